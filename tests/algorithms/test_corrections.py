"""Sampler-to-learner corrections: weights by hand at each level, and the mismatch metrics."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jit_and_eager import both

from manus_jax.algorithms import corrections
from manus_jax.algorithms.corrections import Correction

# Segment 1: token ratios 4, 1, 0.25 (product 1) around an observation; segment 2: 3, 3 (product 9,
# geometric mean 3); then padding.
RATIOS = np.array([[4.0, 100.0, 1.0, 0.25, 3.0, 3.0, 100.0]])
MASK = jnp.array([[1, 0, 1, 1, 1, 1, 0]])
SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 0]])
SAMPLER = jnp.full((1, 7), -5.0)
LEARNER = jnp.asarray(np.log(RATIOS) - 5.0, jnp.float32)


@both
@pytest.mark.parametrize(
    ("correction", "weights", "changed"),
    [
        (Correction("token", "truncate", high=2), [2, 1, 1, 0.25, 2, 2, 1], [1, 0, 0, 0, 1, 1, 0]),
        (Correction("token", "mask", 0.5, 3.5), [0, 1, 1, 0, 3, 3, 1], [1, 0, 0, 1, 0, 0, 0]),
        (Correction("token", "reject", 0.5, 3.5), [0, 1, 1, 0, 1, 1, 1], [1, 0, 0, 1, 0, 0, 0]),
        (Correction("sequence", "truncate", high=2), [1, 1, 1, 1, 2, 2, 1], [0] * 4 + [1, 1, 0]),
        (Correction("sequence", "mask", 0.5, 5), [1, 1, 1, 1, 0, 0, 1], [0] * 4 + [1, 1, 0]),
        (Correction("sequence", "mask", 0.5, 10), [1, 1, 1, 1, 9, 9, 1], [0] * 7),
        (Correction("geometric", "truncate", high=5), [1, 1, 1, 1, 3, 3, 1], [0] * 7),
        (Correction("geometric", "mask", 0.5, 5), [1, 1, 1, 1, 3, 3, 1], [0] * 7),
        (Correction("geometric", "reject", 0.9, 1.1), [1, 1, 1, 1, 0, 0, 1], [0] * 4 + [1, 1, 0]),
    ],
    ids=str,
)
def test_weights_match_hand_calculation(variant, correction, weights, changed):
    fn = variant(partial(corrections.importance_weights, correction, num_segments=3))
    got = fn(LEARNER, SAMPLER, MASK, SEGMENTS)
    np.testing.assert_allclose(got[0], [weights], rtol=1e-5)
    np.testing.assert_array_equal(got[1], [changed])


@pytest.mark.parametrize("name", corrections.CORRECTIONS)
def test_weights_are_detached_and_one_on_policy(name):
    correction = corrections.CORRECTIONS[name]

    @jax.jit
    @jax.value_and_grad
    def total(learner):
        fn = partial(corrections.importance_weights, correction, num_segments=3)
        return fn(learner, SAMPLER, MASK, SEGMENTS)[0].sum()

    np.testing.assert_array_equal(total(LEARNER)[1], np.zeros((1, 7)))
    np.testing.assert_allclose(total(SAMPLER)[0], 7.0)


def test_extreme_ratios_stay_finite():
    far = SAMPLER.at[0, 0].set(1e4)
    correction = Correction("sequence", "truncate", high=1e9)
    weights_of = jax.jit(partial(corrections.importance_weights, correction, num_segments=3))
    weights, _ = weights_of(far, SAMPLER, MASK, SEGMENTS)
    assert np.all(np.isfinite(weights))


def test_sequence_weights_do_not_leak_between_rows_or_depend_on_packing():
    rng = np.random.default_rng(1)
    lengths = [3, 1, 4, 2]
    ratios = [rng.normal(scale=0.3, size=n).astype(np.float32) for n in lengths]
    expected = [np.exp(x.sum()) for x in ratios]

    def weights_of(rows):
        """rows: lists of sequence numbers; returns the weight seen by each sequence."""
        learner = np.zeros((len(rows), 8), np.float32)
        ids, mask = np.zeros((len(rows), 8), int), np.zeros((len(rows), 8), bool)
        spans = {}
        for r, row in enumerate(rows):
            start = 0
            for s, i in enumerate(row):
                cut = slice(start, start + lengths[i])
                learner[r, cut], ids[r, cut], mask[r, cut] = ratios[i], s + 1, True
                spans[i], start = (r, cut), cut.stop
        correction = Correction("sequence", "truncate", high=100.0)
        fn = jax.jit(partial(corrections.importance_weights, correction, num_segments=4))
        weights = np.asarray(fn(learner, np.zeros_like(learner), mask, ids)[0])
        for i, span in spans.items():
            np.testing.assert_allclose(weights[span], expected[i], rtol=1e-5)

    weights_of([[0], [1], [2], [3]])
    weights_of([[0, 2], [1, 3]])
    weights_of([[3, 2, 1], [0]])


def test_wrong_corrections_are_refused():
    with pytest.raises(ValueError, match="unknown level 'row'; there are token"):
        Correction("row", "mask")
    with pytest.raises(ValueError, match="unknown action 'drop'; there are truncate"):
        Correction("token", "drop")
    with pytest.raises(ValueError, match="low < high"):
        Correction("token", "mask", low=3.0, high=2.0)
    with pytest.raises(ValueError, match=r"unknown correction 'tis'.*\(known: token_tis"):
        corrections.CORRECTIONS["tis"]
    with pytest.raises(ValueError, match="needs segment_ids"):
        corrections.importance_weights(Correction("sequence", "mask"), LEARNER, SAMPLER, MASK)


@both
def test_mismatch_metrics_match_numpy(variant):
    rng = np.random.default_rng(2)
    sampler = np.log(rng.random((4, 9))).astype(np.float32)
    learner = np.log(np.clip(np.exp(sampler) + rng.normal(scale=0.02, size=(4, 9)), 0.01, 1))
    learner = learner.astype(np.float32)
    mask = rng.random((4, 9)) < 0.6
    poisoned = np.where(mask, learner, np.nan)
    got = variant(corrections.mismatch_metrics)(poisoned, sampler, mask)

    lp, lq = learner[mask].astype(np.float64), sampler[mask].astype(np.float64)
    p, q, w = np.exp(lp), np.exp(lq), np.exp(lp - lq)
    expected = {
        "log_prob_diff_mean": np.abs(lp - lq).mean(),
        "log_prob_diff_max": np.abs(lp - lq).max(),
        "prob_diff_mean": np.abs(p - q).mean(),
        "prob_diff_max": np.abs(p - q).max(),
        "kl_k1": (lq - lp).mean(),
        "kl_k3": (w - 1 - np.log(w)).mean(),
        "prob_pearson": np.corrcoef(p, q)[0, 1],
        "effective_sample_size": w.sum() ** 2 / (len(w) * (w**2).sum()),
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=1e-6, err_msg=name)


def test_mismatch_metrics_of_equal_policies_and_of_nothing():
    metrics = jax.jit(corrections.mismatch_metrics)
    same = metrics(SAMPLER, SAMPLER, MASK)
    assert same["effective_sample_size"] == 1 and same["prob_pearson"] == 1
    assert same["kl_k3"] == 0 and same["log_prob_diff_max"] == 0
    empty = metrics(LEARNER, SAMPLER, jnp.zeros(MASK.shape))
    assert all(np.isfinite(value) for value in empty.values())
