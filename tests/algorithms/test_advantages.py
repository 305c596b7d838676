"""Token-level and group-level advantages against hand calculation and slow numpy loops."""

from functools import partial

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jit_and_eager import both

from manus_jax.algorithms import advantages

dr_grpo = partial(advantages.grpo, normalize_by_std=False)
slow_search = hypothesis.settings(max_examples=40, deadline=None)


def f32(*values):
    return jnp.array(values, jnp.float32)


def gae_reference(r, v, gamma, lam):
    """The textbook recursion, over a sequence that has nothing but agent tokens."""
    adv = np.zeros(len(r))
    for t in reversed(range(len(r))):
        v_next = v[t + 1] if t + 1 < len(r) else 0.0
        adv_next = adv[t + 1] if t + 1 < len(r) else 0.0
        adv[t] = r[t] + gamma * v_next - v[t] + gamma * lam * adv_next
    return adv


def group_reference(scores, groups, valid, fn):
    """Applies fn(scores of one group) -> advantages of that group, group by group."""
    out = np.zeros(len(scores))
    for group in set(groups):
        rows = [i for i in range(len(scores)) if groups[i] == group and valid[i]]
        if rows:
            out[rows] = fn(np.array([scores[i] for i in rows], np.float64))
    return out


def grpo_of_one_group(s):
    return s if len(s) == 1 else (s - s.mean()) / (s.std(ddof=1) + 1e-6)


def rloo_of_one_group(s):
    return s if len(s) == 1 else np.array([s[i] - np.delete(s, i).mean() for i in range(len(s))])


def passk_of_one_group(s):
    out = np.zeros(len(s))
    if len(s) > 1:
        order = np.argsort(-s, kind="stable")
        out[order[0]] = (s[order[0]] - s[order[1]]) / (s.std(ddof=1) + 1e-6)
    return out


@both
def test_gae_matches_hand_calculation(variant):
    # gamma 0.9, lam 0.8, gamma lam 0.72.
    # delta = [0.9*0.2 - 0.5, 0.9*0.4 - 0.2, 1 - 0.4] = [-0.32, 0.16, 0.6]
    # adv = [-0.32 + 0.72*0.592, 0.16 + 0.72*0.6, 0.6] = [0.10624, 0.592, 0.6]
    fn = variant(partial(advantages.gae, gamma=0.9, lam=0.8))
    adv_t, ret_t = fn(f32(0, 0, 1), f32(0.5, 0.2, 0.4), jnp.ones(3, bool))
    np.testing.assert_allclose(adv_t, [0.10624, 0.592, 0.6], rtol=1e-5)
    np.testing.assert_allclose(ret_t, [0.60624, 0.792, 1.0], rtol=1e-5)


@both
def test_gae_steps_over_observation_tokens(variant):
    # The case above with three tokens that are not the agent's, holding rubbish.
    fn = variant(partial(advantages.gae, gamma=0.9, lam=0.8))
    r_t = f32(9, 0, 9, jnp.nan, 0, 1)
    v_t = f32(7, 0.5, 7, jnp.nan, 0.2, 0.4)
    adv_t, ret_t = fn(r_t, v_t, jnp.array([0, 1, 0, 0, 1, 1]))
    np.testing.assert_allclose(adv_t, [0, 0.10624, 0, 0, 0.592, 0.6], rtol=1e-5)
    np.testing.assert_allclose(ret_t, [0, 0.60624, 0, 0, 0.792, 1.0], rtol=1e-5)


def test_gae_with_lam_one_is_return_minus_value():
    # Pins that lam is read: with lam 0 the first advantage is the one-step delta instead.
    r_t, v_t, mask_t = f32(0, 0, 2), f32(0.5, 0.25, 1), jnp.ones(3, bool)
    np.testing.assert_allclose(advantages.gae(r_t, v_t, mask_t, 1.0, 1.0)[0], [1.5, 1.75, 1.0])
    np.testing.assert_allclose(advantages.gae(r_t, v_t, mask_t, 1.0, 0.0)[0], [-0.25, 0.75, 1.0])


def test_gae_on_ragged_batch_matches_numpy_reference():
    rng = np.random.default_rng(0)
    mask = rng.random((16, 24)) < rng.random((16, 1))
    r = rng.normal(size=mask.shape).astype(np.float32)
    v = rng.normal(size=mask.shape).astype(np.float32)
    fn = jax.jit(jax.vmap(partial(advantages.gae, gamma=0.97, lam=0.9)))
    adv, ret = map(np.asarray, fn(r, v, mask))
    for i, m in enumerate(mask):
        expected = gae_reference(r[i, m], v[i, m], 0.97, 0.9)
        np.testing.assert_allclose(adv[i, m], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ret[i, m], expected + v[i, m], rtol=1e-4, atol=1e-5)
        assert not np.any(adv[i, ~m]) and not np.any(ret[i, ~m])


@both
def test_rewards_to_go_match_hand_calculation_and_pass_observations(variant):
    # From the end: 2; 0 + 0.5*2 = 1; 1 + 0.5*1 = 1.5. The reward on a masked token is not seen.
    fn = variant(partial(advantages.rewards_to_go, gamma=0.5))
    g_t = fn(f32(1, 8, 0, 8, 2), jnp.array([1, 0, 1, 0, 1]))
    np.testing.assert_allclose(g_t, [1.5, 0, 1, 0, 2])


gae_16 = jax.jit(partial(advantages.gae, gamma=0.9, lam=0.7))
to_go_16 = jax.jit(partial(advantages.rewards_to_go, gamma=0.9))


@pytest.mark.bug("B18")
@slow_search
@hypothesis.given(st.integers(0, 10), st.data())
def test_inserting_observation_tokens_changes_nothing(agent_tokens, data):
    numbers = st.floats(-3, 3, width=32)
    r = data.draw(st.lists(numbers, min_size=agent_tokens, max_size=agent_tokens))
    v = data.draw(st.lists(numbers, min_size=agent_tokens, max_size=agent_tokens))
    places = data.draw(st.permutations(range(16)))[:agent_tokens]

    def spread(positions):
        r_t, v_t = np.full((2, 16), 1e6, np.float32)
        mask_t = np.zeros(16, bool)
        r_t[positions], v_t[positions], mask_t[positions] = r, v, True
        adv_t, ret_t = gae_16(r_t, v_t, mask_t)
        return [np.asarray(x)[positions] for x in (adv_t, ret_t, to_go_16(r_t, mask_t))]

    compact = spread(list(range(agent_tokens)))
    for before, after in zip(compact, spread(sorted(places)), strict=True):
        np.testing.assert_array_equal(before, after)


@both
def test_whiten_matches_hand_calculation(variant):
    # Of [-1, 1, 1, 1]: mean 0.5, sum of squares 2.25 + 3*0.25 = 3, over M - 1 = 3: variance 1.
    x = jnp.array([[-1.0, 1.0, jnp.nan], [1.0, 1.0, 5.0]])
    mask = jnp.array([[1, 1, 0], [1, 1, 0]], bool)
    np.testing.assert_allclose(
        variant(advantages.whiten)(x, mask), [[-1.5, 0.5, 0], [0.5, 0.5, 0]], rtol=1e-6
    )


@pytest.mark.parametrize("count", [0, 1])
def test_whiten_is_finite_with_one_entry_or_none(count):
    out = advantages.whiten(f32(3, 4, 5), jnp.arange(3) < count)
    np.testing.assert_array_equal(out, [0, 0, 0])


@pytest.mark.bug("B3")
def test_whiten_does_not_blow_up_float_noise():
    noisy = f32(1000.0, 1000.0001, 1000.0)
    np.testing.assert_array_equal(advantages.whiten(noisy, jnp.ones(3, bool)), [0, 0, 0])


SCORES = f32(1, 0, 2, 5, 3, 4)
GROUPS = jnp.array([0, 1, 0, 2, 0, 1])
VALID = jnp.ones(6, bool)


@both
def test_grpo_matches_hand_calculation(variant):
    # {1, 2, 3}: mean 2, std 1. {0, 4}: mean 2, std sqrt(8). {5}: mean 0, std 1.
    half = 2 / 8**0.5
    adv = variant(advantages.grpo)(SCORES, GROUPS, VALID)
    np.testing.assert_allclose(adv, [-1, -half, 0, 5, 1, half], rtol=1e-5)


@both
def test_dr_grpo_subtracts_the_mean_alone(variant):
    adv = variant(dr_grpo)(SCORES, GROUPS, VALID)
    np.testing.assert_allclose(adv, [-1, -2, 0, 5, 1, 2], rtol=1e-6)


@both
def test_rloo_matches_hand_calculation(variant):
    # 1 - (2+3)/2, 2 - (1+3)/2, 3 - (1+2)/2; 0 - 4, 4 - 0; a lone 5 has no baseline.
    adv = variant(advantages.rloo)(SCORES, GROUPS, VALID)
    np.testing.assert_allclose(adv, [-1.5, -4, 0, 5, 1.5, 4], rtol=1e-6)


@both
def test_passk_rewards_only_the_leader(variant):
    # {1, 2, 3}: lead 1, std 1. {0, 4}: lead 4, std sqrt(8). {5}: nobody to lead.
    adv = variant(advantages.grpo_passk)(SCORES, GROUPS, VALID)
    np.testing.assert_allclose(adv, [0, 0, 0, 0, 1, 2**0.5], rtol=1e-5)
    tied = variant(advantages.grpo_passk)(f32(3, 3, 1, 1, 3, 1), jnp.zeros(6, int), VALID)
    np.testing.assert_array_equal(tied, np.zeros(6))


@both
def test_reinforce_pp_baseline_matches_hand_calculation(variant):
    # Scores 1 and 3, minus 2: -1 on one token, +1 on three; whitened as in the test of whiten.
    mask = jnp.array([[1, 0, 0], [1, 1, 1], [1, 1, 1]])
    adv = variant(advantages.reinforce_pp_baseline)(
        f32(1, 3, 9), jnp.zeros(3, int), jnp.array([1, 1, 0]), mask
    )
    np.testing.assert_allclose(adv, [[-1.5, 0, 0], [0.5, 0.5, 0.5], [0, 0, 0]], rtol=1e-6)


@both
def test_remax_subtracts_the_greedy_score(variant):
    fn = variant(advantages.remax)
    np.testing.assert_allclose(fn(jnp.ones((2, 3)), f32(0.25, 1)), [[0.75] * 3, [0.0] * 3])


@pytest.mark.parametrize("fn", [advantages.grpo, dr_grpo, advantages.rloo, advantages.grpo_passk])
def test_constant_groups_give_exactly_zero_in_spite_of_float_noise(fn):
    # 0.1 summed in different orders; the last group is constant and large.
    tenth = np.float32(0.1)
    scores = f32(tenth * 3, tenth + tenth + tenth, np.float32(0.3), 1e4, 1e4 + 2e-3, 0, 0)
    adv = jax.jit(fn)(scores, jnp.array([0, 0, 0, 1, 1, 2, 2]), jnp.ones(7, bool))
    np.testing.assert_array_equal(adv, np.zeros(7))


def test_a_rare_outlier_is_not_taken_for_a_constant_group():
    grpo = jax.jit(advantages.grpo)
    adv = grpo(f32(1, 1, 1, 1.001), jnp.zeros(4, int), jnp.ones(4, bool))
    # mean 1.00025, std sqrt((3*0.00025² + 0.00075²)/3) = 0.0005: -0.5 and 1.5 but for eps.
    np.testing.assert_allclose(adv, [-0.5, -0.5, -0.5, 1.5], rtol=5e-3)


def test_has_signal_keeps_groups_whose_outcomes_differ():
    outcomes = f32(1, 1, 0, 1, 1, 1, 0)
    groups = jnp.array([0, 0, 1, 1, 2, 3, 3])
    valid = jnp.array([1, 1, 1, 1, 1, 1, 0])
    # Group 0 is all right, group 2 alone, group 3 alone once the failed row is out.
    kept = jax.jit(advantages.has_signal)(outcomes, groups, valid)
    np.testing.assert_array_equal(kept, [False, False, True, True, False, False, False])


grpo_12, rloo_12 = jax.jit(advantages.grpo), jax.jit(advantages.rloo)
passk_12 = jax.jit(advantages.grpo_passk)


@pytest.mark.parametrize(
    ("fn", "reference"),
    [(grpo_12, grpo_of_one_group), (rloo_12, rloo_of_one_group), (passk_12, passk_of_one_group)],
    ids=["grpo", "rloo", "grpo_passk"],
)
@slow_search
@hypothesis.given(st.integers(0, 2**31))
def test_group_advantages_match_numpy_reference_on_ragged_groups(fn, reference, seed):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=12).astype(np.float32)
    groups = rng.integers(0, rng.integers(1, 13), size=12)
    valid = rng.random(12) < 0.8
    expected = group_reference(scores, groups, valid, reference)
    # Two scores that happen to be close cancel in float32; hence the absolute tolerance.
    np.testing.assert_allclose(fn(scores, groups, valid), expected, rtol=2e-3, atol=2e-3)


@slow_search
@hypothesis.given(st.integers(0, 2**31))
def test_group_advantages_follow_permutations_and_ignore_invalid_rows(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, size=12).astype(np.float32)
    groups = rng.integers(0, 4, size=12)
    valid = np.arange(12) < 9
    permutation, relabel = rng.permutation(12), rng.permutation(12)
    poisoned = np.where(valid, scores, rng.choice([np.nan, np.inf, 1e9], size=12))
    for fn in (grpo_12, rloo_12):
        adv = np.asarray(fn(scores, groups, valid))
        assert not np.any(adv[~valid])
        moved = fn(poisoned[permutation], relabel[groups][permutation], valid[permutation])
        np.testing.assert_allclose(moved, adv[permutation], rtol=1e-4, atol=1e-5)


def test_wrong_ranks_and_types_are_refused():
    with pytest.raises(AssertionError):
        advantages.gae(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones((2, 3), bool), 1.0, 1.0)
    with pytest.raises(AssertionError):
        advantages.grpo(SCORES, SCORES, VALID)
    with pytest.raises(AssertionError):
        advantages.rewards_to_go(jnp.arange(3), jnp.ones(3, bool), 1.0)


def test_group_advantages_compile_once_for_any_grouping():
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(advantages.grpo, n=1))
    traced(SCORES, GROUPS, VALID)
    traced(SCORES, jnp.zeros(6, int), VALID)
