"""Allocation of an episode's reward to the agent's tokens.

Functions take one sequence; `allocate` batches them. With every allocation, token rewards are on
agent tokens only and sum to the episode reward (a sequence without agent tokens gets none). Turn
ids give the agent turn of each token: ints in [0, T), non-decreasing along the sequence; only those
of agent tokens are read.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from manus_jax.registry import Registry


def _check(mask_t: chex.Array, turn_ids_t: chex.Array) -> tuple[jax.Array, jax.Array]:
    chex.assert_rank([mask_t, turn_ids_t], 1)
    chex.assert_equal_shape([mask_t, turn_ids_t])
    chex.assert_type(turn_ids_t, int)
    mask_t = jnp.asarray(mask_t, bool)
    return mask_t, jnp.where(mask_t, turn_ids_t, 0)


def _is_last(mask_t: jax.Array) -> jax.Array:
    later = jnp.cumsum(mask_t[::-1])[::-1] - mask_t
    return mask_t & (later == 0)


def last_token(
    mask_t: chex.Array, turn_ids_t: chex.Array, episode_reward: float | chex.Array
) -> jax.Array:
    """Puts the whole reward on the last agent token.

    Args:
      mask_t: agent tokens, [T].
      turn_ids_t: int, [T].
      episode_reward: a scalar.

    Returns:
      Token rewards, [T].
    """
    mask_t, _ = _check(mask_t, turn_ids_t)
    return jnp.where(_is_last(mask_t), episode_reward, 0.0)


def uniform_positive(
    mask_t: chex.Array, turn_ids_t: chex.Array, episode_reward: float | chex.Array
) -> jax.Array:
    """Spreads a positive reward evenly over all agent tokens; puts a negative one on the last.

    Arguments and result as in `last_token`.
    """
    mask_t, _ = _check(mask_t, turn_ids_t)
    share = episode_reward / jnp.maximum(mask_t.sum(), 1)
    blame = jnp.where(_is_last(mask_t), episode_reward, 0.0)
    return jnp.where(jnp.asarray(episode_reward) > 0, jnp.where(mask_t, share, 0.0), blame)


def discounted(
    mask_t: chex.Array, turn_ids_t: chex.Array, episode_reward: float | chex.Array, gamma: float
) -> jax.Array:
    """Splits the reward over turns in proportion to gamma ** (agent tokens after the turn).

    Each turn's share is spread evenly over its tokens. The shares are normalised: with gamma 1 all
    turns get the same, and the sum is the episode reward, not a multiple of it.

    Args:
      mask_t, turn_ids_t, episode_reward: as in `last_token`.
      gamma: discount per agent token, in [0, 1].

    Returns:
      Token rewards, [T].
    """
    mask_t, turn_ids_t = _check(mask_t, turn_ids_t)
    turns = mask_t.shape[0]
    tokens = jax.ops.segment_sum(mask_t.astype(jnp.float32), turn_ids_t, turns)
    tokens_after = tokens.sum() - jnp.cumsum(tokens)
    share = jnp.where(tokens > 0, jnp.power(jnp.float32(gamma), tokens_after), 0.0)
    share = share / jnp.maximum(share.sum(), jnp.finfo(jnp.float32).tiny)
    per_token = (share / jnp.maximum(tokens, 1.0))[turn_ids_t]
    return jnp.where(mask_t, episode_reward * per_token, 0.0)


def per_turn(
    mask_t: chex.Array,
    turn_ids_t: chex.Array,
    episode_reward: float | chex.Array,
    step_rewards: chex.Array,
) -> jax.Array:
    """Puts each step reward on the last agent token of its turn, and the remainder on the last one.

    The reward of a turn without agent tokens goes to the nearest agent token before it, or else to
    the first agent token of the sequence.

    Args:
      mask_t, turn_ids_t, episode_reward: as in `last_token`.
      step_rewards: reward of each turn, [K], 0 for padding; every turn id is below K.

    Returns:
      Token rewards, [T].
    """
    mask_t, turn_ids_t = _check(mask_t, turn_ids_t)
    chex.assert_rank(step_rewards, 1)
    chex.assert_type(step_rewards, float)
    positions = jnp.where(mask_t, jnp.arange(mask_t.shape[0]), -1)
    last_of_turn = jax.ops.segment_max(positions, turn_ids_t, step_rewards.shape[0])
    last_so_far = jax.lax.cummax(jnp.maximum(last_of_turn, -1))
    target = jnp.where(last_so_far >= 0, last_so_far, jnp.argmax(mask_t))
    placed = jnp.zeros(mask_t.shape, jnp.float32).at[target].add(step_rewards)
    rest = jnp.where(_is_last(mask_t), episode_reward - step_rewards.sum(), 0.0)
    return jnp.where(mask_t, placed, 0.0) + rest


Allocation = Callable[[chex.Array, chex.Array, chex.Array, chex.Array, float], jax.Array]

# Each under one signature: (mask_t, turn_ids_t, episode_reward, step_rewards, gamma).
ALLOCATIONS: Registry[Allocation] = Registry("reward allocation")
ALLOCATIONS.register("last_token")(
    lambda mask, turns, total, steps, gamma: last_token(mask, turns, total)
)
ALLOCATIONS.register("uniform_positive")(
    lambda mask, turns, total, steps, gamma: uniform_positive(mask, turns, total)
)
ALLOCATIONS.register("discounted")(
    lambda mask, turns, total, steps, gamma: discounted(mask, turns, total, gamma)
)
ALLOCATIONS.register("per_turn")(
    lambda mask, turns, total, steps, gamma: per_turn(mask, turns, total, steps)
)


def allocate(
    name: str,
    mask: chex.Array,
    turn_ids: chex.Array,
    episode_rewards: chex.Array,
    step_rewards: chex.Array,
    gamma: float = 1.0,
) -> jax.Array:
    """Token rewards of a padded batch of episodes with the allocation `name`.

    Args:
      name: a key of ALLOCATIONS.
      mask: agent tokens, [B, T].
      turn_ids: int, [B, T].
      episode_rewards: [B].
      step_rewards: [B, K]; used by per_turn only.
      gamma: discount per agent token; used by discounted only.

    Returns:
      [B, T].
    """
    allocation = ALLOCATIONS[name]
    chex.assert_rank([mask, turn_ids, episode_rewards, step_rewards], [2, 2, 1, 2])
    return jax.vmap(allocation, (0, 0, 0, 0, None))(
        mask, turn_ids, episode_rewards, step_rewards, gamma
    )
