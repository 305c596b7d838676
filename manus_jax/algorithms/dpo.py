"""DPO on episodes: successful episodes of a task are preferred to failed ones.

The loss of a pair is -log sigmoid(beta (r_w - r_l)), where r = log pi - log pi_ref over the agent
tokens of an episode, of the winner w and the loser l. All pairs of a task are compared; a task
counts once, and so does each of its pairs.

The gradient with respect to log pi is -beta sigmoid(-beta (r_w - r_l)) for the winner's tokens and
the opposite for the loser's. These numbers are the advantages, so that the plain policy gradient is
the gradient of DPO for the policy that r was computed with, for any packing of the episodes.

See "Direct Preference Optimization", Rafailov et al. (https://arxiv.org/abs/2305.18290).
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np


class Preferences(NamedTuple):
    """Per episode: the values by which pairs are compared."""

    log_ratios: chex.Array  # [B], r: the sum of log pi - log pi_ref over an episode's agent tokens
    successes: chex.Array  # bool [B]


class PairStatistics(NamedTuple):
    """Means over tasks of the means over their pairs."""

    loss: jax.Array
    accuracy: jax.Array  # the share of pairs with r_w > r_l
    margin: jax.Array  # r_w - r_l


def kept(successes: np.ndarray) -> np.ndarray:
    """Which episodes of a group are trained on, bool [n]: all, if some succeed and some fail."""
    return np.full(len(successes), successes.any() and not successes.all())


def _pairs(
    preferences: Preferences, group_ids: chex.Array, valid: chex.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weight of each pair and its r_w - r_l, [B, B] (winner, loser), and the number of tasks.

    The weights of a task's pairs add up to 1.
    """
    chex.assert_rank([preferences.log_ratios, preferences.successes, group_ids, valid], 1)
    won, valid = jnp.asarray(preferences.successes, bool), jnp.asarray(valid, bool)
    groups = jnp.asarray(group_ids)
    same = groups[:, None] == groups[None, :]
    pairs = (same & (won & valid)[:, None] & (~won & valid)[None, :]).astype(jnp.float32)
    of_group = jax.ops.segment_sum(pairs.sum(1), groups, len(groups))
    weights = pairs / jnp.maximum(of_group, 1.0)[groups][:, None]
    r = jnp.asarray(preferences.log_ratios, jnp.float32)
    return weights, r[:, None] - r[None, :], (of_group > 0).sum()


def dpo(
    preferences: Preferences, group_ids: chex.Array, valid: chex.Array, beta: float
) -> jax.Array:
    """The advantage of each episode, [B]; 0 for one without an opposite in its group.

    It is scaled so that the mean over all valid episodes of the sum of -A log pi over their tokens
    has the gradient of the loss.
    """
    weights, margins, tasks = _pairs(preferences, group_ids, valid)
    slopes = beta * weights * jax.nn.sigmoid(-beta * margins)
    scale = jnp.sum(jnp.asarray(valid, jnp.float32)) / jnp.maximum(tasks, 1)
    return scale * (slopes.sum(1) - slopes.sum(0))


def pair_statistics(
    preferences: Preferences, group_ids: chex.Array, valid: chex.Array, beta: float
) -> PairStatistics:
    """The loss of the batch, and how well the policy tells winners from losers."""
    weights, margins, tasks = _pairs(preferences, group_ids, valid)
    mean = lambda x: jnp.sum(weights * x) / jnp.maximum(tasks, 1)
    return PairStatistics(
        mean(jax.nn.softplus(-beta * margins)),
        mean((margins > 0).astype(jnp.float32)),
        mean(margins),
    )
