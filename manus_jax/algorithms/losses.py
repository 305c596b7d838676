"""Per-token losses.

Each function returns `(loss_t, stats)`, both per token. The caller aggregates the loss with the
weights of `aggregation` and averages the stats over the agent tokens of the whole batch, so that
every denominator is global. All losses are elementwise on arrays of equal shape except `gspo`,
whose ratio belongs to a segment of a packed row. The keys of the stats are metric names.
"""

import chex
import jax
import jax.numpy as jnp

from manus_jax.algorithms import kl, segments

LossAndStats = tuple[jax.Array, dict[str, jax.Array]]


def _log_ratio(log_probs: chex.Array, old_log_probs: chex.Array) -> jax.Array:
    chex.assert_equal_shape([log_probs, old_log_probs])
    chex.assert_type([log_probs, old_log_probs], float)
    return jnp.asarray(log_probs) - old_log_probs


def _clipped_surrogate(
    ratio: jax.Array,
    advantages: chex.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> LossAndStats:
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss_t = jnp.maximum(plain, clipped)
    stats = {"pg_clipfrac": (clipped > plain).astype(jnp.float32)}
    if dual_clip:
        if dual_clip <= 1.0:
            raise ValueError(f"dual_clip must be above 1 (or None), got {dual_clip}")
        ceiling = -advantages * dual_clip
        lower = (advantages < 0) & (loss_t > ceiling)
        loss_t = jnp.where(lower, ceiling, loss_t)
        stats["pg_clipfrac_lower"] = lower.astype(jnp.float32)
    return loss_t, stats


def ppo_clip(
    log_probs: chex.Array,
    old_log_probs: chex.Array,
    advantages: chex.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossAndStats:
    """PPO's clipped surrogate, with a dual clip for negative advantages.

    max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), at most -A dual_clip if A < 0 (unless
    dual_clip is None or 0). rho = exp(log_probs - old_log_probs), with the exponent clamped to ±20.

    See "Proximal Policy Optimization Algorithms", Schulman et al. (https://arxiv.org/abs/1707.06347)
    and, for the dual clip, "Mastering Complex Control in MOBA Games", Ye et al.
    (https://arxiv.org/abs/1912.09729).
    """
    chex.assert_equal_shape([log_probs, advantages])
    log_ratio = _log_ratio(log_probs, old_log_probs)
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    loss_t, stats = _clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)
    return loss_t, stats | {"ppo_kl": -log_ratio}


def gspo(
    log_probs: chex.Array,
    old_log_probs: chex.Array,
    advantages: chex.Array,
    mask: chex.Array,
    segment_ids: chex.Array,
    num_segments: int,
    clip_low: float,
    clip_high: float,
) -> LossAndStats:
    """GSPO: PPO's clip on the sequence ratio, the geometric mean over the agent tokens.

    Every token has the value of its segment's ratio and the gradient of its own log-prob (the
    paper's GSPO-token). With seq-mean-token-mean and one advantage per sequence, the gradient is
    that of the sequence-level objective. Arrays are [rows, length]; see `segments` for the ids.

    See "Group Sequence Policy Optimization", Zheng et al. (https://arxiv.org/abs/2507.18071).
    """
    chex.assert_rank(log_probs, 2)
    chex.assert_equal_shape([log_probs, advantages, mask, segment_ids])
    log_ratio = _log_ratio(log_probs, old_log_probs)
    sequence = segments.segment_mean(log_ratio, mask, segment_ids, num_segments)
    own = log_probs - jax.lax.stop_gradient(log_probs)
    ratio = jnp.exp(jnp.minimum(jax.lax.stop_gradient(sequence) + own, 10.0))
    loss_t, stats = _clipped_surrogate(ratio, advantages, clip_low, clip_high, None)
    return loss_t, stats | {"ppo_kl": -log_ratio}


def cispo(
    log_probs: chex.Array,
    old_log_probs: chex.Array,
    advantages: chex.Array,
    clip_low: float,
    clip_high: float,
) -> LossAndStats:
    """CISPO: policy gradient weighted by a clipped, detached ratio; every token keeps a gradient.

    -stop_gradient(clip(rho, 1 - clip_low, 1 + clip_high)) A log_probs.

    See "MiniMax-M1", Chen et al. (https://arxiv.org/abs/2506.13585).
    """
    chex.assert_equal_shape([log_probs, advantages])
    log_ratio = _log_ratio(log_probs, old_log_probs)
    ratio = jax.lax.stop_gradient(jnp.exp(jnp.clip(log_ratio, -20.0, 20.0)))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    stats = {"pg_clipfrac": (weight != ratio).astype(jnp.float32), "ppo_kl": -log_ratio}
    return -weight * advantages * log_probs, stats


def reinforce(
    log_probs: chex.Array, old_log_probs: chex.Array, advantages: chex.Array
) -> LossAndStats:
    """Plain policy gradient, -A log_probs; the old log-probs are used for stats only."""
    chex.assert_equal_shape([log_probs, advantages])
    return -advantages * log_probs, {"ppo_kl": -_log_ratio(log_probs, old_log_probs)}


def value_loss(
    values: chex.Array, old_values: chex.Array, returns: chex.Array, cliprange: float
) -> LossAndStats:
    """Half the squared error of the critic, clipped around the old values.

    0.5 max((V - R)², (clip(V, V_old ± cliprange) - R)²).
    """
    chex.assert_equal_shape([values, old_values, returns])
    chex.assert_type([values, old_values, returns], float)
    error = (values - returns) ** 2
    clipped = jnp.clip(values, old_values - cliprange, old_values + cliprange)
    clipped_error = (clipped - returns) ** 2
    stats = {
        "vf_clipfrac": (clipped_error > error).astype(jnp.float32),
        "vpred_mean": jnp.asarray(values),
    }
    return 0.5 * jnp.maximum(error, clipped_error), stats


def entropy_bonus(entropy: chex.Array, coef: float) -> LossAndStats:
    """-coef H, a loss term that rewards the entropy of the policy at each token."""
    chex.assert_type(entropy, float)
    return -coef * jnp.asarray(entropy), {"entropy_loss": jnp.asarray(entropy)}


def kl_loss(
    log_probs: chex.Array, ref_log_probs: chex.Array, coef: float, estimator: str
) -> LossAndStats:
    """coef times the KL divergence from the reference policy, by an estimator of `kl`."""
    kl_t = kl.ESTIMATORS[estimator](log_probs, ref_log_probs)
    return coef * kl_t, {"kl_loss": kl_t}
