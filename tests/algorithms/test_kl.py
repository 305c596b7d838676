"""KL estimators, the penalty in the reward, and the controllers of its coefficient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jit_and_eager import both

from manus_jax.algorithms import kl

LOG2 = np.log(2.0)


@both
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # d = [log 2, -log 2]
        (("k1", "kl"), [LOG2, -LOG2]),
        (("abs",), [LOG2, LOG2]),
        (("k2", "mse"), [LOG2**2 / 2] * 2),
        # exp(-d) - 1 + d = 1/2 - 1 + log 2, 2 - 1 - log 2
        (("k3", "low_var_kl", "k3+", "low_var_kl+"), [LOG2 - 0.5, 1 - LOG2]),
    ],
)
def test_estimators_match_hand_calculation_under_all_their_names(variant, names, expected):
    log_probs = jnp.array([-1.0, -1.0 - LOG2])
    ref_log_probs = jnp.array([-1.0 - LOG2, -1.0])
    for name in names:
        value = variant(kl.ESTIMATORS[name])(log_probs, ref_log_probs)
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_the_error_for_an_unknown_estimator_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown KL estimator 'full'.*\(known: k1, kl, abs"):
        kl.ESTIMATORS["full"]


@pytest.mark.parametrize("name", ["k3", "k3+"])
def test_k3_is_clamped_far_from_the_reference(name):
    value = kl.ESTIMATORS[name](jnp.array([-1000.0, 0.0]), jnp.array([0.0, -1000.0]))
    np.testing.assert_allclose(value, [10.0, 10.0], rtol=1e-4)


def test_gradients_of_the_estimators():
    # By d: k1 gives 1, k2 gives d, k3 gives 1 - exp(-d); the straight-through one is k2's.
    log_probs, ref = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
    d = np.array([0.5, -1.0])
    expected = {"k1": np.ones(2), "k2": d, "k3": 1 - np.exp(-d), "k3+": d}
    for name, gradient in expected.items():
        estimator = kl.ESTIMATORS[name]
        got = jax.grad(lambda x, fn=estimator: fn(x, ref).sum())(log_probs)
        np.testing.assert_allclose(got, gradient, rtol=1e-5)


def test_only_k2_has_the_gradient_of_the_divergence_in_expectation():
    # Over all three outcomes, weighted by their probability: no sampling noise.
    logits, ref = jnp.array([0.3, -0.2, 0.9]), jax.nn.log_softmax(jnp.array([0.0, 0.5, -0.4]))

    @jax.jit
    def divergence(logits):
        log_p = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(log_p) * (log_p - ref))

    @partial(jax.jit, static_argnums=1)
    def surrogate(logits, name):
        log_p = jax.nn.log_softmax(logits)
        weight = jax.lax.stop_gradient(jnp.exp(log_p))
        return jnp.sum(weight * kl.ESTIMATORS[name](log_p, ref))

    gradient = jax.jit(jax.grad(surrogate), static_argnums=1)
    true = jax.jit(jax.grad(divergence))(logits)
    for name in ("k2", "k3+"):
        np.testing.assert_allclose(gradient(logits, name), true, atol=1e-6)
    for name in ("k1", "k3"):
        assert np.abs(np.subtract(gradient(logits, name), true)).max() > 0.05
    for name in ("k1", "k3", "k3+"):
        np.testing.assert_allclose(surrogate(logits, name), divergence(logits), rtol=1e-5)


@pytest.mark.bug("B12")
@both
def test_kl_in_reward_touches_every_agent_token_and_no_other(variant):
    # An integer mask used as an index would touch rows 0 and 1 alone; row 2 must move too.
    rewards = jnp.array([[0.0, 1.0], [0.0, 0.0], [0.0, 2.0]])
    kl_t = jnp.array([[1.0, 2.0], [jnp.nan, 4.0], [5.0, 6.0]])
    mask = jnp.array([[1, 1], [0, 1], [1, 0]])
    out = variant(kl.kl_in_reward)(rewards, kl_t, mask, 0.1)
    np.testing.assert_allclose(out, [[-0.1, 0.8], [0.0, -0.4], [-0.5, 2.0]], rtol=1e-6)


def test_observed_kl_is_a_mean_over_rows_of_means_over_agent_tokens():
    # Rows: (1 + 3) / 2 = 2 and 6; the empty row does not count. (2 + 6) / 2.
    kl_t = jnp.array([[1.0, 3.0, 99.0], [6.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
    mask = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(kl.observed_kl(kl_t, mask), 4.0)


def test_the_adaptive_controller_matches_hand_calculation():
    start = kl.AdaptiveKL(coef=0.1, target=0.5, horizon=1000.0)
    # 0.55 / 0.5 - 1 = 0.1; 0.1 * (1 + 0.1 * 100 / 1000) = 0.101
    assert start.update(0.55, 100).coef == pytest.approx(0.101)
    # clipped at ±0.2
    assert start.update(5.0, 100).coef == pytest.approx(0.102)
    assert start.update(0.0, 100).coef == pytest.approx(0.098)
    assert start.coef == 0.1


def test_the_adaptive_coefficient_never_turns_negative():
    assert kl.AdaptiveKL(0.1, 0.5, horizon=10.0).update(0.0, 1000).coef == pytest.approx(0.05)


def test_the_fixed_controller_stays():
    assert kl.FixedKL(0.001).update(100.0, 64) == kl.FixedKL(0.001)


def test_wrong_controllers_are_refused():
    with pytest.raises(ValueError, match="above 0"):
        kl.AdaptiveKL(0.1, 0.0, 1000.0)
    with pytest.raises(ValueError, match="negative"):
        kl.FixedKL(-0.1)
