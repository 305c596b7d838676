"""The device's sampler against distributions worked out in numpy by sorting."""

import functools

import jax
import numpy as np
import pytest

from manus_jax.engines.protocol import Sampling
from manus_jax.engines.sampling import no_controls, sample

DRAWS = 2000
draw = jax.jit(sample)


def reference(logits, how):
    """Log-probs [vocab] of what is sampled from; tokens that are dropped have -inf."""
    z = logits.astype(np.float64) / how.temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    p[p < how.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if how.top_k:
        p[order[how.top_k :]] = 0
    p /= p.sum()
    if how.top_p < 1:
        enough = int(np.argmax(np.cumsum(p[order]) >= how.top_p)) + 1
        p[order[enough:]] = 0
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum())


def draws(logits, how, first_seed=0):
    """One distribution drawn from in many rows with different seeds."""
    controls = no_controls(DRAWS)
    for row in range(DRAWS):
        controls.put(row, how, first_seed + row)
    wide = np.repeat(logits[:, None], DRAWS, axis=1)
    tokens, log_probs = draw(wide, controls, np.full(DRAWS, 5, np.int32))
    return np.asarray(tokens), np.asarray(log_probs)


@functools.cache
def some_logits(vocab):
    return (2 * np.random.default_rng(vocab).normal(size=vocab)).astype(np.float32)


@pytest.mark.bug("B21")
@pytest.mark.parametrize(
    "how",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_k=7),
        Sampling(top_p=0.8),
        Sampling(min_p=0.2),
        Sampling(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01),
        Sampling(top_k=1),
        Sampling(top_p=1e-6),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [96, 300])
def test_draws_follow_the_distribution_and_log_probs_are_its(vocab, how):
    logits = some_logits(vocab)
    expected = reference(logits, how)
    tokens, log_probs = draws(logits, how)
    np.testing.assert_allclose(log_probs, expected[tokens], atol=2e-5)
    p = np.exp(expected)
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[p == 0].sum() == 0
    # Six standard deviations of a count, and one for the rounding of small expectations.
    assert np.all(np.abs(counts - DRAWS * p) <= 6 * np.sqrt(DRAWS * p * (1 - p)) + 1)


def test_temperature_zero_takes_the_likeliest_token_under_temperature_one():
    logits = some_logits(300)
    tokens, log_probs = draws(logits, Sampling(temperature=0.0, top_k=3, top_p=0.1))
    assert set(tokens.tolist()) == {int(np.argmax(logits))}
    np.testing.assert_allclose(log_probs, reference(logits, Sampling()).max(), atol=1e-5)
    ties = np.zeros(300, np.float32)
    ties[[131, 250]] = 4.0
    assert set(draws(ties, Sampling(temperature=0.0))[0].tolist()) == {131}


def test_rows_of_a_batch_are_sampled_each_in_their_own_way():
    hows = [Sampling(), Sampling(temperature=0.0), Sampling(top_k=3), Sampling(top_p=0.5)]
    logits = np.stack([some_logits(300) * (1 + n / 10) for n in range(64)], axis=1)
    together = no_controls(64)
    for row in range(64):
        together.put(row, hows[row % 4], row)
    positions = np.arange(64, dtype=np.int32)
    tokens, log_probs = map(np.asarray, draw(logits, together, positions))
    for row in range(0, 64, 7):
        alone = no_controls(64)
        alone.put(0, hows[row % 4], row)
        column = np.repeat(logits[:, row : row + 1], 64, axis=1)
        token, log_prob = draw(column, alone, np.full(64, positions[row]))
        assert (token[0], log_prob[0]) == (tokens[row], log_probs[row])


def test_tokens_without_probability_are_never_drawn():
    logits = np.full(300, -np.inf, np.float32)
    logits[[5, 290]] = [1.0, 1.0]
    tokens, log_probs = draws(logits, Sampling())
    assert set(tokens.tolist()) == {5, 290}
    np.testing.assert_allclose(log_probs, np.log(0.5), atol=1e-6)


def test_seeds_count_with_64_bits_and_positions_make_new_draws():
    controls = no_controls(4)
    for row, seed in enumerate((1, 1 + 2**32, -1, 1)):
        controls.put(row, Sampling(), seed)
    flat = np.zeros((100_000, 4), np.float32)
    tokens = np.asarray(draw(flat, controls, np.array([7, 7, 7, 8], np.int32))[0])
    assert len(set(tokens.tolist())) == 4
    again = np.asarray(draw(flat, controls, np.array([7, 7, 7, 7], np.int32))[0])
    assert again[0] == again[3] == tokens[0]
