"""Advantage estimators.

Token-level estimators take the arrays of one sequence, [T], and are batched with `vmap`; they
process agent tokens only, as if the observation tokens between them did not exist. Group-level
estimators take one score per episode, [B], and compare it with the other episodes of the same task;
invalid rows do not affect any statistic and get 0. Masks are bool or 0/1. Group ids are ints in
[0, B), so that shapes are static under jit.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

# Scores whose relative difference is below this are treated as equal: sums of token rewards have
# float32 noise, and dividing by its std would turn it into advantages of ±1.
CONSTANT_RTOL = 1e-5


def gae(
    r_t: chex.Array, v_t: chex.Array, mask_t: chex.Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    """Generalized advantage estimation over the agent tokens of one sequence.

    delta_t = r_t + gamma v_next - v_t, adv_t = delta_t + gamma lam adv_next, where "next" is the
    next agent token (0 after the last): tokens outside the mask contribute no reward, no delta and
    no decay. `v_t` is the value of the state before each token. Returns (adv_t, ret_t), [T] each,
    with ret_t = adv_t + v_t; 0 outside the mask.

    See "High-Dimensional Continuous Control Using Generalized Advantage Estimation", Schulman et
    al. (https://arxiv.org/abs/1506.02438).
    """
    chex.assert_rank([r_t, v_t, mask_t], 1)
    chex.assert_equal_shape([r_t, v_t, mask_t])
    chex.assert_type([r_t, v_t], float)
    mask_t = jnp.asarray(mask_t, bool)

    def step(
        carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        v_next, adv_next = carry
        r, v, m = inputs
        adv = r + gamma * v_next - v + gamma * lam * adv_next
        return (jnp.where(m, v, v_next), jnp.where(m, adv, adv_next)), jnp.where(m, adv, 0.0)

    zero = jnp.zeros((), jnp.float32)
    inputs = (jnp.asarray(r_t, jnp.float32), jnp.asarray(v_t, jnp.float32), mask_t)
    _, adv_t = jax.lax.scan(step, (zero, zero), inputs, reverse=True)
    return adv_t, jnp.where(mask_t, adv_t + v_t, 0.0)


def rewards_to_go(r_t: chex.Array, mask_t: chex.Array, gamma: float) -> jax.Array:
    """Discounted sum of the rewards from each agent token on, across observations.

    g_t = r_t + gamma g_next, where "next" is the next agent token; 0 outside the mask. All [T].
    """
    chex.assert_rank([r_t, mask_t], 1)
    chex.assert_equal_shape([r_t, mask_t])
    chex.assert_type(r_t, float)

    def step(g_next: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        r, m = inputs
        g = r + gamma * g_next
        return jnp.where(m, g, g_next), jnp.where(m, g, 0.0)

    inputs = (jnp.asarray(r_t, jnp.float32), jnp.asarray(mask_t, bool))
    return jax.lax.scan(step, jnp.zeros((), jnp.float32), inputs, reverse=True)[1]


def whiten(x: chex.Array, mask: chex.Array, eps: float = 1e-8) -> jax.Array:
    """Scales the masked entries of `x`, of any shape, to zero mean and unit variance.

    The variance is Bessel-corrected, and `eps` is added to it. If all entries are equal up to float
    noise, or there is only one, the result is 0. 0 outside the mask.
    """
    chex.assert_equal_shape([x, mask])
    chex.assert_type(x, float)
    mask = jnp.asarray(mask, bool)
    count = mask.sum()
    mean = jnp.sum(x, where=mask) / jnp.maximum(count, 1)
    deviation = jnp.where(mask, x - mean, 0.0)
    variance = jnp.sum(deviation**2) / jnp.maximum(count - 1, 1)

    spread = jnp.max(x, where=mask, initial=-jnp.inf) - jnp.min(x, where=mask, initial=jnp.inf)
    constant = spread <= CONSTANT_RTOL * jnp.max(jnp.abs(x), where=mask, initial=0.0)
    return jnp.where(constant, 0.0, deviation * jax.lax.rsqrt(variance + eps))


class GroupStatistics(NamedTuple):
    """Statistics of each row's group over its valid rows; every field is [B]."""

    size: jax.Array
    mean: jax.Array
    std: jax.Array  # unbiased; 0 for a group of one
    constant: jax.Array  # at least two members, all equal up to float noise


def group_statistics(
    scores: chex.Array, group_ids: chex.Array, valid: chex.Array
) -> GroupStatistics:
    """Statistics of each row's group; all [B]. Rows that are not valid are ignored."""
    chex.assert_rank([scores, group_ids, valid], 1)
    chex.assert_equal_shape([scores, group_ids, valid])
    chex.assert_type([scores, group_ids], [float, int])
    group_ids, valid = jnp.asarray(group_ids), jnp.asarray(valid, bool)
    groups = scores.shape[0]

    def total(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(jnp.where(valid, x, 0.0), group_ids, groups)

    def largest(x: jax.Array) -> jax.Array:
        return jax.ops.segment_max(jnp.where(valid, x, -jnp.inf), group_ids, groups)

    size = total(jnp.ones(groups, jnp.float32))
    mean = total(scores) / jnp.maximum(size, 1.0)
    std = jnp.sqrt(total((scores - mean[group_ids]) ** 2) / jnp.maximum(size - 1.0, 1.0))
    spread = largest(scores) + largest(-scores)
    constant = (size > 1) & (spread <= CONSTANT_RTOL * largest(jnp.abs(scores)))
    return GroupStatistics(*(field[group_ids] for field in (size, mean, std, constant)))


def _centred(scores: chex.Array, stats: GroupStatistics, valid: chex.Array) -> jax.Array:
    """Scores minus the group mean; the score itself in a group of one; 0 if not valid."""
    centred = jnp.where(stats.size > 1, scores - stats.mean, scores)
    return jnp.where(jnp.asarray(valid, bool) & ~stats.constant, centred, 0.0)


def grpo(
    scores: chex.Array,
    group_ids: chex.Array,
    valid: chex.Array,
    normalize_by_std: bool = True,
    eps: float = 1e-6,
) -> jax.Array:
    """Group-relative advantage: (score - group mean) / (group std + eps).

    For a group of one, the mean is taken as 0 and the std as 1. If all scores of a group are equal
    up to float noise, the advantage is exactly 0. Without `normalize_by_std` only the mean is
    subtracted, which does not favour tasks with success rates near 0 or 1 (Dr. GRPO). All [B].

    See "DeepSeekMath", Shao et al. (https://arxiv.org/abs/2402.03300), and "Understanding
    R1-Zero-Like Training", Liu et al. (https://arxiv.org/abs/2503.20783).
    """
    stats = group_statistics(scores, group_ids, valid)
    centred = _centred(scores, stats, valid)
    if not normalize_by_std:
        return centred
    return centred / (jnp.where(stats.size > 1, stats.std, 1.0) + eps)


def rloo(scores: chex.Array, group_ids: chex.Array, valid: chex.Array) -> jax.Array:
    """Leave-one-out advantage: the score minus the mean score of the others in the group.

    Equal to n / (n - 1) (score - group mean); the score itself in a group of one.

    See "Back to Basics", Ahmadian et al. (https://arxiv.org/abs/2402.14740).
    """
    stats = group_statistics(scores, group_ids, valid)
    return _centred(scores, stats, valid) * stats.size / jnp.maximum(stats.size - 1.0, 1.0)


def reinforce_pp_baseline(
    scores: chex.Array, group_ids: chex.Array, valid: chex.Array, mask: chex.Array
) -> jax.Array:
    """REINFORCE++ with a group baseline: subtracts the group mean, then whitens over all tokens.

    `mask` and the result are [B, T]. See "REINFORCE++", Hu et al.
    (https://arxiv.org/abs/2501.03262).
    """
    chex.assert_rank(mask, 2)
    counted = jnp.asarray(mask, bool) & jnp.asarray(valid, bool)[:, None]
    centred = grpo(scores, group_ids, valid, normalize_by_std=False)
    return whiten(jnp.broadcast_to(centred[:, None], mask.shape), counted)


def remax(returns: chex.Array, greedy_scores: chex.Array) -> jax.Array:
    """ReMax: the rewards-to-go, [B, T], minus the score of a greedy rollout of the same task, [B].

    See "ReMax", Li et al. (https://arxiv.org/abs/2310.10505).
    """
    chex.assert_rank([returns, greedy_scores], [2, 1])
    chex.assert_type([returns, greedy_scores], float)
    chex.assert_equal_shape_prefix([returns, greedy_scores], 1)
    return returns - greedy_scores[:, None]


def grpo_passk(
    scores: chex.Array,
    group_ids: chex.Array,
    valid: chex.Array,
    normalize_by_std: bool = True,
    eps: float = 1e-6,
) -> jax.Array:
    """Pass@k advantage: the best episode of a group gets its lead over the second best.

    All others get 0, as do ties for the best and groups of one. Without the division by the std,
    the gradient of the expected best score of a group is unbiased.

    See "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning",
    Tang et al. (https://arxiv.org/abs/2503.19595).
    """
    stats = group_statistics(scores, group_ids, valid)
    group_ids, valid = jnp.asarray(group_ids), jnp.asarray(valid, bool)
    rows = jnp.arange(scores.shape[0])
    candidates = jnp.where(valid, scores, -jnp.inf)

    best = jax.ops.segment_max(candidates, group_ids, scores.shape[0])[group_ids]
    leader = jax.ops.segment_min(
        jnp.where(valid & (scores == best), rows, scores.shape[0]), group_ids, scores.shape[0]
    )[group_ids]
    is_leader = valid & (rows == leader)
    others = jnp.where(is_leader, -jnp.inf, candidates)
    second = jax.ops.segment_max(others, group_ids, scores.shape[0])[group_ids]

    lead = scores - second
    tied = lead <= CONSTANT_RTOL * jnp.maximum(jnp.abs(best), jnp.abs(second))
    lead = jnp.where(is_leader & (stats.size > 1) & ~tied, lead, 0.0)
    return lead / (stats.std + eps) if normalize_by_std else lead


def has_signal(outcomes: chex.Array, group_ids: chex.Array, valid: chex.Array) -> jax.Array:
    """Selects rows of groups whose outcomes differ, which dynamic sampling keeps: bool [B].

    Pass the outcome (success, final score) rather than a shaped reward: with shaping, groups in
    which every episode fails look informative. Rows that are not valid and groups of one are False.

    See "DAPO", Yu et al. (https://arxiv.org/abs/2503.14476).
    """
    stats = group_statistics(outcomes, group_ids, valid)
    return jnp.asarray(valid, bool) & (stats.size > 1) & ~stats.constant
