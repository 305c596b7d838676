"""Rewards on agent tokens: placement by hand, and the sum as a property of every allocation."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jit_and_eager import both

from manus_jax.algorithms import reward_allocation

# prompt, turn 0 (two tokens), observation, turn 1 (one token), observation, padding
MASK = jnp.array([0, 1, 1, 0, 1, 0, 0])
TURNS = jnp.array([0, 0, 0, 0, 1, 1, 1])


def allocated(variant, name, reward, steps=(0.0, 0.0), gamma=1.0, mask=MASK, turns=TURNS):
    fn = variant(partial(reward_allocation.allocate, name))
    return fn(mask[None], turns[None], jnp.array([reward]), jnp.array([steps]), gamma)[0]


@both
def test_last_token_takes_all(variant):
    np.testing.assert_allclose(allocated(variant, "last_token", 3.0), [0, 0, 0, 0, 3, 0, 0])


@both
def test_uniform_positive_shares_a_gain_and_puts_a_loss_on_the_last_token(variant):
    fn = partial(allocated, variant, "uniform_positive")
    np.testing.assert_allclose(fn(3.0), [0, 1, 1, 0, 1, 0, 0])
    np.testing.assert_allclose(fn(-3.0), [0, 0, 0, 0, -3, 0, 0])
    np.testing.assert_allclose(fn(0.0), np.zeros(7))


@both
def test_discounted_matches_hand_calculation(variant):
    # One agent token after turn 0, none after turn 1: shares 0.5 and 1, normalised 1/3 and 2/3.
    token_rewards = allocated(variant, "discounted", 3.0, gamma=0.5)
    np.testing.assert_allclose(token_rewards, [0, 0.5, 0.5, 0, 2, 0, 0], rtol=1e-6)


@pytest.mark.bug("B13")
def test_discounted_at_gamma_one_is_not_multiplied_by_the_number_of_turns():
    # Each of two turns gets half; unnormalised it would be 3 each.
    token_rewards = allocated(jax.jit, "discounted", 3.0, gamma=1.0)
    np.testing.assert_allclose(token_rewards, [0, 0.75, 0.75, 0, 1.5, 0, 0])


def test_discounted_at_gamma_zero_is_the_last_turn_alone():
    token_rewards = allocated(jax.jit, "discounted", 3.0, gamma=0.0)
    np.testing.assert_allclose(token_rewards, [0, 0, 0, 0, 3, 0, 0])


@both
def test_per_turn_puts_each_step_on_the_last_agent_token_of_its_turn(variant):
    # 0.25 + 0.5 by the steps; the 0.25 that the episode has beyond them goes to the last token.
    token_rewards = allocated(variant, "per_turn", 1.0, [0.25, 0.5, 0.0])
    np.testing.assert_allclose(token_rewards, [0, 0, 0.25, 0, 0.75, 0, 0])


def test_per_turn_reward_of_a_silent_turn_goes_to_the_nearest_agent_token():
    mask, turns = jnp.array([0, 0, 1, 1, 0, 1]), jnp.array([0, 0, 1, 1, 2, 3])
    # Turn 0 has no agent token and none before it: the first. Turn 2 has none: turn 1's last.
    steps = [1.0, 2.0, 4.0, 8.0]
    token_rewards = allocated(jax.jit, "per_turn", 15.0, steps, mask=mask, turns=turns)
    np.testing.assert_allclose(token_rewards, [0, 0, 1, 6, 0, 8])


allocators = {
    name: jax.jit(partial(reward_allocation.allocate, name))
    for name in reward_allocation.ALLOCATIONS
}


@pytest.mark.bug("B13")
@pytest.mark.parametrize("name", reward_allocation.ALLOCATIONS)
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.integers(0, 2**31), st.floats(0, 1, width=32))
def test_rewards_sum_to_the_episodes_and_sit_on_agent_tokens(name, seed, gamma):
    rng = np.random.default_rng(seed)
    mask = rng.random((4, 20)) < rng.random((4, 1))
    turn_ids = np.minimum(np.cumsum(rng.random((4, 20)) < 0.3, axis=1), 5)
    episode = rng.normal(size=4).astype(np.float32)
    steps = rng.normal(size=(4, 6)).astype(np.float32)
    token_rewards = np.asarray(allocators[name](mask, turn_ids, episode, steps, gamma))
    assert not np.any(token_rewards[~mask])
    expected = np.where(mask.any(1), episode, 0.0)
    np.testing.assert_allclose(token_rewards.sum(1), expected, rtol=1e-4, atol=1e-5)


def test_the_error_for_an_unknown_allocation_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown reward allocation 'first'.*\(known: last_token"):
        reward_allocation.allocate("first", MASK, TURNS, 1.0, 1.0)
