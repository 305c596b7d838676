"""Aggregation weights: the four modes by hand, and invariance under every way to split a batch."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from manus_jax.algorithms import aggregation

MASK = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0]], bool)
LOSS = np.array([[1.0, 2.0, 6.0], [9.0, 5.0, 9.0], [9.0, 9.0, 9.0]], np.float32)
BY_HAND = {
    "token-mean": 14 / 4,
    "seq-mean-token-mean": (9 / 3 + 5) / 2,  # the empty row is no sequence
    "seq-mean-token-sum": (9 + 5) / 2,
    "seq-mean-token-sum-norm": (9 + 5) / 10 / 2,
}


@pytest.mark.bug("B20")
@pytest.mark.parametrize("mode", aggregation.AGGREGATIONS)
def test_modes_match_hand_calculation(mode):
    weights = aggregation.token_weights(MASK, mode, norm_constant=10)
    assert isinstance(weights, np.ndarray) and weights.dtype == np.float32
    np.testing.assert_allclose((weights * LOSS).sum(), BY_HAND[mode], rtol=1e-6)
    as_integers = aggregation.token_weights(MASK.astype(np.int32), mode, norm_constant=10)
    np.testing.assert_array_equal(as_integers, weights)


@pytest.mark.bug("B20")
@pytest.mark.parametrize("mode", aggregation.AGGREGATIONS)
def test_rows_without_agent_tokens_and_padding_do_not_count(mode):
    mask = np.pad(np.concatenate([MASK, np.zeros((2, 3), bool)]), ((0, 0), (0, 4)))
    loss = np.pad(np.concatenate([LOSS, np.full((2, 3), 100.0)]), ((0, 0), (0, 4)))
    weights = aggregation.token_weights(mask, mode, 10)
    np.testing.assert_allclose((weights * loss).sum(), BY_HAND[mode], rtol=1e-6)


@pytest.mark.bug("B20")
@pytest.mark.parametrize("mode", aggregation.AGGREGATIONS)
def test_an_empty_batch_has_weight_zero(mode):
    weights = aggregation.token_weights(np.zeros((2, 3), bool), mode, 10)
    np.testing.assert_array_equal(weights, np.zeros((2, 3)))


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"unknown loss aggregation 'mean'.*\(known: token-mean"):
        aggregation.token_weights(MASK, "mean")
    with pytest.raises(ValueError, match="divides by norm_constant"):
        aggregation.token_weights(MASK, "seq-mean-token-sum-norm")


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.integers(0, 2**31), st.sampled_from([*aggregation.AGGREGATIONS]))
def test_the_loss_does_not_depend_on_micro_batches_or_packing(seed, mode):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, size=9)
    losses = [rng.normal(size=n) for n in lengths]
    expected = {
        "token-mean": np.concatenate(losses).sum() / max(lengths.sum(), 1),
        "seq-mean-token-mean": np.sum([x.mean() for x in losses if len(x)]),
        "seq-mean-token-sum": np.sum([x.sum() for x in losses]),
        "seq-mean-token-sum-norm": np.sum([x.sum() / 16 for x in losses]),
    }[mode]
    if mode != "token-mean":
        expected /= max((lengths > 0).sum(), 1)

    weights = aggregation.sequence_weights(lengths, mode, 16)
    # One stream of tokens in another order, cut into micro-batches of unequal size.
    order = rng.permutation(9)
    stream = np.concatenate([weights[i] * losses[i] for i in order])
    cuts = np.sort(rng.integers(0, len(stream) + 1, size=3))
    micro_batches = [part.sum() for part in np.split(stream, cuts)]
    np.testing.assert_allclose(sum(micro_batches), expected, rtol=1e-5, atol=1e-6)
