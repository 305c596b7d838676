"""Allocation of an episode's reward to the agent's tokens.

An allocation takes one sequence; `allocate` batches them. With every allocation, token rewards are
on agent tokens only and sum to the episode reward (a sequence without agent tokens gets none).

    mask_t: agent tokens, [T].
    turn_ids_t: the agent turn of each token, int [T] in [0, T), non-decreasing along the sequence;
      only those of agent tokens are read.
    episode_reward: a scalar.
    step_rewards: the reward of each turn, [K], 0 for padding; every turn id is below K.
    gamma: discount per agent token, in [0, 1].
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from manus_jax.registry import Registry

Scalar = float | jax.Array
Allocation = Callable[[chex.Array, chex.Array, Scalar, chex.Array, Scalar], jax.Array]

ALLOCATIONS: Registry[Allocation] = Registry("reward allocation")


def _is_last(mask_t: jax.Array) -> jax.Array:
    later = jnp.cumsum(mask_t[::-1])[::-1] - mask_t
    return mask_t & (later == 0)


@ALLOCATIONS.register("last_token")
def last_token(
    mask_t: chex.Array,
    turn_ids_t: chex.Array,
    episode_reward: Scalar,
    step_rewards: chex.Array,
    gamma: Scalar,
) -> jax.Array:
    """Puts the whole reward on the last agent token."""
    return jnp.where(_is_last(mask_t), episode_reward, 0.0)


@ALLOCATIONS.register("uniform_positive")
def uniform_positive(
    mask_t: chex.Array,
    turn_ids_t: chex.Array,
    episode_reward: Scalar,
    step_rewards: chex.Array,
    gamma: Scalar,
) -> jax.Array:
    """Spreads a positive reward evenly over all agent tokens; puts a negative one on the last."""
    share = episode_reward / jnp.maximum(mask_t.sum(), 1)
    blame = jnp.where(_is_last(mask_t), episode_reward, 0.0)
    return jnp.where(jnp.asarray(episode_reward) > 0, jnp.where(mask_t, share, 0.0), blame)


@ALLOCATIONS.register("discounted")
def discounted(
    mask_t: chex.Array,
    turn_ids_t: chex.Array,
    episode_reward: Scalar,
    step_rewards: chex.Array,
    gamma: Scalar,
) -> jax.Array:
    """Splits the reward over turns in proportion to gamma ** (agent tokens after the turn).

    Each turn's share is spread evenly over its tokens. The shares are normalised: with gamma 1 all
    turns get the same, and the sum is the episode reward, not a multiple of it.
    """
    turns = mask_t.shape[0]
    tokens = jax.ops.segment_sum(mask_t.astype(jnp.float32), turn_ids_t, turns)
    tokens_after = tokens.sum() - jnp.cumsum(tokens)
    share = jnp.where(tokens > 0, jnp.power(jnp.float32(gamma), tokens_after), 0.0)
    share = share / jnp.maximum(share.sum(), jnp.finfo(jnp.float32).tiny)
    per_token = (share / jnp.maximum(tokens, 1.0))[turn_ids_t]
    return jnp.where(mask_t, episode_reward * per_token, 0.0)


@ALLOCATIONS.register("per_turn")
def per_turn(
    mask_t: chex.Array,
    turn_ids_t: chex.Array,
    episode_reward: Scalar,
    step_rewards: chex.Array,
    gamma: Scalar,
) -> jax.Array:
    """Puts each step reward on the last agent token of its turn, and the remainder on the last one.

    The reward of a turn without agent tokens goes to the nearest agent token before it, or else to
    the first agent token of the sequence.
    """
    positions = jnp.where(mask_t, jnp.arange(mask_t.shape[0]), -1)
    last_of_turn = jax.ops.segment_max(positions, turn_ids_t, step_rewards.shape[0])
    last_so_far = jax.lax.cummax(jnp.maximum(last_of_turn, -1))
    target = jnp.where(last_so_far >= 0, last_so_far, jnp.argmax(mask_t))
    placed = jnp.zeros(mask_t.shape, jnp.float32).at[target].add(step_rewards)
    rest = jnp.where(_is_last(mask_t), episode_reward - step_rewards.sum(), 0.0)
    return jnp.where(mask_t, placed, 0.0) + rest


def allocate(
    name: str,
    mask: chex.Array,
    turn_ids: chex.Array,
    episode_rewards: chex.Array,
    step_rewards: chex.Array,
    gamma: Scalar = 1.0,
) -> jax.Array:
    """Token rewards [B, T] of a padded batch of B episodes with the allocation `name`."""
    allocation = ALLOCATIONS[name]
    chex.assert_rank([mask, turn_ids, episode_rewards, step_rewards], [2, 2, 1, 2])
    chex.assert_equal_shape([mask, turn_ids])
    chex.assert_type([turn_ids, step_rewards], [int, float])
    mask = jnp.asarray(mask, bool)
    turn_ids = jnp.where(mask, turn_ids, 0)
    return jax.vmap(allocation, (0, 0, 0, 0, None))(
        mask, turn_ids, episode_rewards, step_rewards, gamma
    )
