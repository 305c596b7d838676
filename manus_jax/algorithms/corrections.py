"""Importance corrections for the mismatch between sampler and learner.

The engine's log-probs differ from the learner's because of kernels, precision and older weights. A
correction turns the ratio learner / sampler into a detached weight that multiplies the policy loss
before aggregation. It has a level at which the ratio is taken (token, product over the sequence,
geometric mean over the sequence) and an action (truncate, mask, reject). Several corrections are
multiplied.

See "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", Yao et al. 2025 (TIS),
and "Every Step Evolves", Ling team (https://arxiv.org/abs/2510.18855) (IcePop).
"""

from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp

from manus_jax.algorithms import kl, segments
from manus_jax.registry import Registry

LEVELS = ("token", "sequence", "geometric")
ACTIONS = ("truncate", "mask", "reject")


@dataclass(frozen=True)
class Correction:
    """One correction.

    level: the ratio of each token, of the whole sequence (product), or the sequence's geometric
      mean.
    action: truncate (the ratio, at most `high`), mask (the ratio inside [low, high], else 0) or
      reject (1 inside [low, high], else 0).
    """

    level: str
    action: str
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"unknown level {self.level!r}; there are {', '.join(LEVELS)}")
        if self.action not in ACTIONS:
            raise ValueError(f"unknown action {self.action!r}; there are {', '.join(ACTIONS)}")
        if not 0.0 <= self.low < self.high:
            raise ValueError(f"need 0 <= low < high, got low={self.low}, high={self.high}")


CORRECTIONS: Registry[Correction] = Registry("correction")
CORRECTIONS.register("token_tis")(Correction("token", "truncate", high=2.0))
CORRECTIONS.register("icepop")(Correction("token", "mask", low=0.5, high=5.0))
CORRECTIONS.register("sequence_tis")(Correction("sequence", "truncate", high=2.0))
CORRECTIONS.register("sequence_mis")(Correction("sequence", "mask", low=0.5, high=2.0))
CORRECTIONS.register("geometric_tis")(Correction("geometric", "truncate", high=2.0))
CORRECTIONS.register("geometric_rejection")(Correction("geometric", "reject", low=0.99, high=1.01))


def importance_weights(
    correction: Correction,
    log_probs: chex.Array,
    sampler_log_probs: chex.Array,
    mask: chex.Array,
    segment_ids: chex.Array | None = None,
    num_segments: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The weight of every token, detached, and 1 where the ratio was truncated, masked or rejected.

    All arrays are [rows, length]; `log_probs` are the learner's (old) ones. Token-level corrections
    need no segment ids (see `segments`). Outside the mask, the weight is 1.
    """
    chex.assert_equal_shape([log_probs, sampler_log_probs, mask])
    chex.assert_type([log_probs, sampler_log_probs], float)
    mask = jnp.asarray(mask, bool)
    log_ratio = jnp.where(mask, jnp.asarray(log_probs) - sampler_log_probs, 0.0)
    if correction.level != "token":
        if segment_ids is None or num_segments is None:
            raise ValueError(f"a {correction.level} correction needs segment_ids and num_segments")
        reduce = {"sequence": segments.segment_total, "geometric": segments.segment_mean}
        log_ratio = reduce[correction.level](log_ratio, mask, segment_ids, num_segments)
    ratio = jax.lax.stop_gradient(jnp.exp(jnp.clip(log_ratio, -20.0, 20.0)))

    inside = (ratio >= correction.low) & (ratio <= correction.high)
    if correction.action == "truncate":
        weights, changed = jnp.minimum(ratio, correction.high), ratio > correction.high
    elif correction.action == "mask":
        weights, changed = jnp.where(inside, ratio, 0.0), ~inside
    else:
        weights, changed = inside.astype(jnp.float32), ~inside
    return jnp.where(mask, weights, 1.0), (changed & mask).astype(jnp.float32)


def mismatch_metrics(
    log_probs: chex.Array, sampler_log_probs: chex.Array, mask: chex.Array
) -> dict[str, jax.Array]:
    """Metrics of the mismatch between learner and sampler on the agent tokens of a batch.

    Arrays of one shape. Scalars: mean and max of |log-prob difference| and of |probability
    difference|, KL(sampler || learner) by k1 and k3, the Pearson correlation of the probabilities
    (if undefined, 1 for equal probabilities and 0 otherwise), and the effective sample size of the
    importance weights as a fraction of the tokens (1 on policy).
    """
    chex.assert_equal_shape([log_probs, sampler_log_probs, mask])
    chex.assert_type([log_probs, sampler_log_probs], float)
    mask = jnp.asarray(mask, bool)
    learner = jnp.where(mask, log_probs, 0.0)
    sampler = jnp.where(mask, sampler_log_probs, 0.0)
    tokens = jnp.maximum(mask.sum(), 1)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(x, where=mask) / tokens

    distance = jnp.abs(learner - sampler)
    p, q = jnp.exp(learner), jnp.exp(sampler)
    prob_distance = jnp.abs(p - q)
    dp, dq = p - mean(p), q - mean(q)
    norm = jnp.sqrt(mean(dp**2)) * jnp.sqrt(mean(dq**2))
    undefined = jnp.where(prob_distance.max() == 0, 1.0, 0.0)
    pearson = jnp.where(norm > 0, mean(dp * dq) / jnp.where(norm > 0, norm, 1.0), undefined)
    weights = jnp.exp(jnp.clip(learner - sampler, -20.0, 20.0))
    return {
        "log_prob_diff_mean": mean(distance),
        "log_prob_diff_max": distance.max(),
        "prob_diff_mean": mean(prob_distance),
        "prob_diff_max": prob_distance.max(),
        "kl_k1": mean(kl.k1(sampler, learner)),
        "kl_k3": mean(kl.k3(sampler, learner)),
        "prob_pearson": pearson,
        "effective_sample_size": mean(weights) ** 2 / jnp.maximum(mean(weights**2), 1e-30),
    }
