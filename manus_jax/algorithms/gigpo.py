"""GiGPO: group-in-group advantages for multi-turn episodes.

Episodes of one task often pass through identical states. The steps taken from such an anchor state
form a group, and comparing their discounted returns estimates the value of each action there
without a critic. Anchor states are clustered by string comparison on the host, which yields integer
ids; the advantages are computed from those ids under jit.

See "Group-in-Group Policy Optimization for LLM Agent Training", Feng et al.
(https://arxiv.org/abs/2505.10978).
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from manus_jax.algorithms import advantages


class Steps(NamedTuple):
    """The steps (agent turns) of B episodes, padded to K per row."""

    rewards: chex.Array  # [B, K]
    mask: chex.Array  # [B, K], steps that were taken
    anchor_ids: chex.Array  # int [B, K] in [0, B * K), equal for steps from the same anchor state
    turn_ids: chex.Array  # int [B, T] in [0, K), the step each token belongs to


def _similar(a: str, b: str, threshold: float) -> bool:
    matcher = SequenceMatcher(None, a, b)
    # The first two conditions are cheap upper bounds of the ratio.
    return (
        matcher.real_quick_ratio() >= threshold
        and matcher.quick_ratio() >= threshold
        and matcher.ratio() >= threshold
    )


def cluster_anchors(
    observations: Sequence[Sequence[str]],
    group_ids: Sequence[int] | np.ndarray,
    similarity: float | None,
    num_steps: int,
) -> np.ndarray:
    """Numbers the anchor observations of a batch of episodes (host side).

    `observations` are what the agent saw before each step of each of B episodes. Two steps get the
    same id if their episodes belong to one group and their observations are identical. With
    `similarity`, in (0, 1], difflib's ratio between the step's observation and the first
    observation of the cluster must reach it; the earliest such cluster is used.

    Returns int32 [B, num_steps], ids in [0, B * num_steps); padding is 0.
    """
    ids = np.zeros((len(observations), num_steps), np.int32)
    first_of_cluster: dict[int, list[tuple[str, int]]] = {}
    known: dict[tuple[int, str], int] = {}
    clusters = 0
    for row, (episode, group) in enumerate(zip(observations, map(int, group_ids), strict=True)):
        for step, text in enumerate(episode):
            found = known.get((group, text))
            representatives = first_of_cluster.setdefault(group, [])
            if found is None and similarity is not None:
                matches = (i for seen, i in representatives if _similar(seen, text, similarity))
                found = next(matches, None)
            if found is None:
                found = clusters
                clusters += 1
                representatives.append((text, found))
            known[group, text] = ids[row, step] = found
    return ids


def step_returns(rewards: chex.Array, step_mask: chex.Array, gamma: float) -> jax.Array:
    """Discounted return of each step of its episode, R_k = r_k + gamma R_{k+1}, [B, K]."""
    chex.assert_rank([rewards, step_mask], 2)
    return jax.vmap(advantages.rewards_to_go, (0, 0, None))(rewards, step_mask, gamma)


def step_advantages(
    returns: chex.Array,
    step_mask: chex.Array,
    anchor_ids: chex.Array,
    normalize_by_std: bool = False,
    eps: float = 1e-6,
) -> jax.Array:
    """Each step's return relative to the other steps from the same anchor state; all [B, K].

    `normalize_by_std` False subtracts the cluster's mean (mean_norm), True divides by its std as
    well (mean_std_norm). 0 for a step that is the only one of its cluster, and at padding.
    """
    chex.assert_rank([returns, step_mask, anchor_ids], 2)
    chex.assert_equal_shape([returns, step_mask, anchor_ids])
    flat = (jnp.ravel(returns), jnp.ravel(anchor_ids), jnp.ravel(step_mask))
    relative = advantages.grpo(*flat, normalize_by_std=normalize_by_std, eps=eps)
    shared = advantages.group_statistics(*flat).size > 1
    return jnp.where(shared, relative, 0.0).reshape(returns.shape)


def gigpo(
    scores: chex.Array,
    group_ids: chex.Array,
    valid: chex.Array,
    steps: Steps,
    gamma: float,
    step_weight: float = 1.0,
    normalize_by_std: bool = False,
    eps: float = 1e-6,
) -> jax.Array:
    """A = A_episode + step_weight A_step for each step, [B, K]; 0 at padding.

    A_episode is GRPO's advantage of the scores [B]; each episode counts once, regardless of its
    number of steps. Rows that are not valid are excluded from both parts and get 0. `gamma` is the
    discount per step, `step_weight` the paper's omega.
    """
    chex.assert_equal_shape([steps.rewards, steps.mask, steps.anchor_ids])
    chex.assert_equal_shape_prefix([scores, steps.rewards], 1)
    counted = jnp.asarray(steps.mask, bool) & jnp.asarray(valid, bool)[:, None]
    episode = advantages.grpo(scores, group_ids, valid, normalize_by_std, eps)
    step = step_advantages(
        step_returns(steps.rewards, steps.mask, gamma),
        counted,
        steps.anchor_ids,
        normalize_by_std,
        eps,
    )
    return jnp.where(counted, episode[:, None] + step_weight * step, 0.0)


def to_tokens(adv_BK: chex.Array, turn_ids: chex.Array, mask: chex.Array) -> jax.Array:
    """Assigns each step's advantage, [B, K], to the agent tokens of its turn, [B, T]."""
    chex.assert_rank([adv_BK, turn_ids, mask], 2)
    chex.assert_type(turn_ids, int)
    mask = jnp.asarray(mask, bool)
    turns = jnp.where(mask, turn_ids, 0)
    return jnp.where(mask, jnp.take_along_axis(adv_BK, turns, axis=1), 0.0)
