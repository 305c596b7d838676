"""Policy, value, entropy and KL losses: values by hand, and gradients where clipping applies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jit_and_eager import both

from manus_jax.algorithms import losses

# Ratios and advantages that visit every side of the clip; old log-probs are all -1.
RATIOS = np.array([1.0, 1.5, 1.5, 0.5, 0.5, 1.1, 6.0])
ADVANTAGES = jnp.array([2.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0])
OLD = jnp.full(7, -1.0)
LOG_PROBS = jnp.asarray(np.log(RATIOS) - 1.0, jnp.float32)


@both
def test_ppo_clip_matches_hand_calculation(variant):
    fn = variant(partial(losses.ppo_clip, clip_low=0.2, clip_high=0.3))
    loss_t, stats = fn(LOG_PROBS, OLD, ADVANTAGES)
    # max(-A rho, -A clip(rho, 0.8, 1.3)): -2; -1.3 clipped; 1.5; -0.5; 0.8 clipped; 1.1; 6.
    np.testing.assert_allclose(loss_t, [-2, -1.3, 1.5, -0.5, 0.8, 1.1, 6.0], rtol=1e-5)
    np.testing.assert_array_equal(stats["pg_clipfrac"], [0, 1, 0, 0, 1, 0, 0])
    np.testing.assert_allclose(stats["ppo_kl"], -np.log(RATIOS), atol=1e-6)
    assert "pg_clipfrac_lower" not in stats


@both
def test_dual_clip_bounds_the_loss_of_negative_advantages(variant):
    fn = variant(partial(losses.ppo_clip, clip_low=0.2, clip_high=0.3, dual_clip=3.0))
    loss_t, stats = fn(LOG_PROBS, OLD, ADVANTAGES)
    np.testing.assert_allclose(loss_t, [-2, -1.3, 1.5, -0.5, 0.8, 1.1, 3.0], rtol=1e-5)
    np.testing.assert_array_equal(stats["pg_clipfrac_lower"], [0, 0, 0, 0, 0, 0, 1])


def test_dual_clip_is_off_at_none_and_zero_and_refused_below_one():
    off = [losses.ppo_clip(LOG_PROBS, OLD, ADVANTAGES, 0.2, 0.3, c)[0] for c in (None, 0)]
    np.testing.assert_array_equal(off[0], off[1])
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        losses.ppo_clip(LOG_PROBS, OLD, ADVANTAGES, 0.2, 0.3, 0.5)


def test_ppo_gradient_is_zero_beyond_the_clip_and_that_of_the_ratio_inside():
    def total(log_probs):
        return losses.ppo_clip(log_probs, OLD, ADVANTAGES, 0.2, 0.3, 3.0)[0].sum()

    # -A rho where nothing clips; 0 where the clip, or the dual clip, does.
    expected = [-2.0, 0.0, 1.5, -0.5, 0.0, 1.1, 0.0]
    np.testing.assert_allclose(jax.grad(total)(LOG_PROBS), expected, rtol=1e-5, atol=1e-7)


def test_ppo_ratio_cannot_overflow():
    loss_t, _ = losses.ppo_clip(jnp.array([0.0]), jnp.array([-1e4]), jnp.array([-1.0]), 0.2, 0.2)
    np.testing.assert_allclose(loss_t, [np.exp(20.0)], rtol=1e-4)


# Two rows of packed segments of unequal lengths, with an observation token inside one of them.
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 0]])
MASK = jnp.array([[1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]], bool)
SEGMENT_ADVANTAGES = jnp.array([[1.0, 1, 1, -1, -1, 9], [2.0, -3, -3, -3, -3, 9]])


def gspo_case():
    rng = np.random.default_rng(0)
    old = -rng.random((2, 6)).astype(np.float32)
    return old + rng.normal(scale=0.2, size=(2, 6)).astype(np.float32), old


def segments_of(mask=MASK, ids=SEGMENTS):
    """(row, columns of the agent tokens) of each of the four segments."""
    mask, ids = np.asarray(mask), np.asarray(ids)
    return [
        (row, [c for c in range(6) if ids[row, c] == s and mask[row, c]])
        for row in range(2)
        for s in (1, 2)
    ]


@both
def test_gspo_loss_is_that_of_the_segments_geometric_mean(variant):
    new, old = gspo_case()
    fn = variant(partial(losses.gspo, num_segments=3, clip_low=0.05, clip_high=0.1))
    loss_t = np.asarray(fn(new, old, SEGMENT_ADVANTAGES, MASK, SEGMENTS)[0])
    for row, columns in segments_of():
        s = np.exp(np.mean([new[row, c] - old[row, c] for c in columns]))
        a = float(SEGMENT_ADVANTAGES[row, columns[0]])
        expected = max(-a * s, -a * np.clip(s, 0.95, 1.1))
        np.testing.assert_allclose(loss_t[row, columns], expected, rtol=1e-5)


@pytest.mark.parametrize("clips", [(0.05, 0.1), (10.0, 10.0)], ids=["clipped", "unclipped"])
def test_gspo_gradient_is_that_of_the_sequence_objective(clips):
    new, old = gspo_case()
    low, high = clips

    def token_form(x):
        loss_t, _ = losses.gspo(x, old, SEGMENT_ADVANTAGES, MASK, SEGMENTS, 3, low, high)
        return sum(loss_t[row, np.array(c)].mean() for row, c in segments_of()) / 4

    def sequence_form(x):
        total = 0.0
        for row, c in segments_of():
            s = jnp.exp((x[row, np.array(c)] - old[row, np.array(c)]).mean())
            a = SEGMENT_ADVANTAGES[row, c[0]]
            total += jnp.maximum(-a * s, -a * jnp.clip(s, 1 - low, 1 + high)) / 4
        return total

    expected = np.asarray(jax.jit(jax.grad(sequence_form))(new))
    gradient = jax.jit(jax.grad(token_form))(new)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    assert np.any(expected)


def test_gspo_observation_tokens_do_not_enter_the_ratio():
    new, old = gspo_case()
    fn = jax.jit(partial(losses.gspo, num_segments=3, clip_low=0.05, clip_high=0.1))
    moved = jnp.where(MASK, new, new + 3.0)
    a = fn(new, old, SEGMENT_ADVANTAGES, MASK, SEGMENTS)[0]
    b = fn(moved, old, SEGMENT_ADVANTAGES, MASK, SEGMENTS)[0]
    np.testing.assert_array_equal(np.asarray(a)[MASK], np.asarray(b)[MASK])


@both
def test_cispo_matches_hand_calculation(variant):
    fn = variant(partial(losses.cispo, clip_low=1.0, clip_high=4.0))
    loss_t, stats = fn(LOG_PROBS, OLD, ADVANTAGES)
    weight = np.minimum(RATIOS, 5.0)
    np.testing.assert_allclose(loss_t, -weight * ADVANTAGES * LOG_PROBS, rtol=1e-5)
    np.testing.assert_array_equal(stats["pg_clipfrac"], [0, 0, 0, 0, 0, 0, 1])


def test_cispo_drops_no_token():
    def total(log_probs):
        return losses.cispo(log_probs, OLD, ADVANTAGES, 0.2, 0.3)[0].sum()

    # -clip(rho, 0.8, 1.3) A, with no gradient through the weight.
    expected = -np.clip(RATIOS, 0.8, 1.3) * np.asarray(ADVANTAGES)
    np.testing.assert_allclose(jax.grad(total)(LOG_PROBS), expected, rtol=1e-5)


@both
def test_reinforce_is_the_plain_policy_gradient(variant):
    loss_t, stats = variant(losses.reinforce)(LOG_PROBS, OLD, ADVANTAGES)
    np.testing.assert_allclose(loss_t, -ADVANTAGES * LOG_PROBS)
    np.testing.assert_allclose(stats["ppo_kl"], -np.log(RATIOS), atol=1e-6)
    gradient = jax.grad(lambda x: losses.reinforce(x, OLD, ADVANTAGES)[0].sum())(LOG_PROBS)
    np.testing.assert_allclose(gradient, -ADVANTAGES)


def test_on_policy_all_losses_have_one_gradient():
    adv = jnp.array([1.0, -2.0, 0.5])
    x = jnp.array([-0.5, -1.0, -2.0])
    for fn in (
        lambda lp: losses.ppo_clip(lp, x, adv, 0.2, 0.2, 3.0),
        lambda lp: losses.cispo(lp, x, adv, 0.2, 0.2),
        lambda lp: losses.reinforce(lp, x, adv),
    ):
        gradient = jax.jit(jax.grad(lambda lp, fn=fn: fn(lp)[0].sum()))(x)
        np.testing.assert_allclose(gradient, -adv, rtol=1e-6)


@both
def test_value_loss_matches_hand_calculation(variant):
    # V 2, old 1, clip 0.5 -> 1.5. R 1: 0.5 max(1, 0.25). R 3: 0.5 max(1, 2.25), clipped.
    # V 1.2: inside the clip. 0.5 * 0.2²
    fn = variant(partial(losses.value_loss, cliprange=0.5))
    loss_t, stats = fn(jnp.array([2.0, 2.0, 1.2]), jnp.ones(3), jnp.array([1.0, 3.0, 1.0]))
    np.testing.assert_allclose(loss_t, [0.5, 1.125, 0.02], rtol=1e-5)
    np.testing.assert_array_equal(stats["vf_clipfrac"], [0, 1, 0])
    np.testing.assert_allclose(stats["vpred_mean"], [2.0, 2.0, 1.2])


def test_value_loss_without_clip_is_half_the_squared_error():
    loss_t, _ = losses.value_loss(jnp.array([2.0]), jnp.array([1.0]), jnp.array([3.0]), 1e9)
    np.testing.assert_allclose(loss_t, [0.5])


def test_value_gradient_is_zero_where_the_clip_holds_it():
    def total(v):
        return losses.value_loss(v, jnp.ones(2), jnp.array([3.0, 1.0]), 0.5)[0].sum()

    # First: moved towards its target beyond the clip: no more. Second: V - R = 1 pulls back.
    np.testing.assert_allclose(jax.grad(total)(jnp.array([2.0, 2.0])), [0.0, 1.0])


def test_entropy_bonus_and_kl_loss_carry_their_coefficients():
    bonus_t, stats = losses.entropy_bonus(jnp.array([2.0, 4.0]), 0.5)
    np.testing.assert_allclose(bonus_t, [-1.0, -2.0])
    np.testing.assert_allclose(stats["entropy_loss"], [2.0, 4.0])
    kl_t, stats = losses.kl_loss(jnp.array([-1.0]), jnp.array([-3.0]), 0.1, "mse")
    np.testing.assert_allclose(kl_t, [0.2], rtol=1e-6)  # 0.1 * 2² / 2
    np.testing.assert_allclose(stats["kl_loss"], [2.0])
