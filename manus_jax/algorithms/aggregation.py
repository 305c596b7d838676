"""Aggregation of per-token losses with global denominators.

Aggregation is a weight per token, computed once from the lengths of the whole batch before it is
split; the loss is `sum(weights * loss_t)`. A sum does not depend on micro-batches, rows, packing,
padding or devices, so neither does the update. The functions accept NumPy arrays (and return NumPy)
or JAX arrays, also under jit.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from manus_jax.registry import Registry

Aggregation = Callable[[Any, Any, float | None, Any], tuple[Any, Any]]
"""(sequence weights [N], lengths [N], norm_constant, numpy or jax.numpy) → the weight of each token
of a sequence, [N], and the denominator of all weights."""

AGGREGATIONS: Registry[Aggregation] = Registry("loss aggregation")


@AGGREGATIONS.register("token-mean")
def _token_mean(weights: Any, lengths: Any, norm: float | None, xp: Any) -> tuple[Any, Any]:
    return weights, (weights * lengths).sum()


@AGGREGATIONS.register("seq-mean-token-mean")
def _seq_mean_token_mean(
    weights: Any, lengths: Any, norm: float | None, xp: Any
) -> tuple[Any, Any]:
    return weights / xp.maximum(lengths, 1), weights.sum()


@AGGREGATIONS.register("seq-mean-token-sum")
def _seq_mean_token_sum(weights: Any, lengths: Any, norm: float | None, xp: Any) -> tuple[Any, Any]:
    return weights, weights.sum()


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def _seq_mean_token_sum_norm(
    weights: Any, lengths: Any, norm: float | None, xp: Any
) -> tuple[Any, Any]:
    if norm is None or norm <= 0:
        raise ValueError(
            f"seq-mean-token-sum-norm divides by norm_constant, which must be above 0; got {norm}"
        )
    return weights / norm, weights.sum()


def sequence_weights(
    lengths: chex.Array,
    mode: str,
    norm_constant: float | None = None,
    row_weights: chex.Array | None = None,
) -> Any:
    """The weight of every agent token of each sequence.

    token-mean gives every token the same weight. seq-mean-* average over sequences the mean of the
    token losses (token-mean), their sum (token-sum), or their sum divided by a constant
    (token-sum-norm). Sequences without agent tokens or with row weight 0 are ignored.

    Args:
      lengths: agent tokens of each sequence, int [N].
      mode: a name in AGGREGATIONS.
      norm_constant: the divisor of seq-mean-token-sum-norm, e.g. the maximum response length.
      row_weights: [N], 1 if None; 0 for padding rows.

    Returns:
      float32 [N]; all 0 if every sequence is ignored.
    """
    chex.assert_rank(lengths, 1)
    xp: Any = jnp if isinstance(lengths, jax.Array) else np
    counts = lengths > 0
    if row_weights is None:
        row_weights = xp.ones(lengths.shape, xp.float32)
    chex.assert_equal_shape([lengths, row_weights])
    weights = xp.where(counts, row_weights, 0.0)
    weights, denominator = AGGREGATIONS[mode](weights, lengths, norm_constant, xp)
    return (weights / xp.where(denominator > 0, denominator, 1.0)).astype(xp.float32)


def token_weights(
    mask: chex.Array,
    mode: str,
    norm_constant: float | None = None,
    row_weights: chex.Array | None = None,
) -> Any:
    """Weights for which the aggregated loss is `sum(token_weights(...) * loss_t)`.

    Args:
      mask: agent tokens of every sequence of the batch, [N, T].
      mode, norm_constant, row_weights: see `sequence_weights`.

    Returns:
      float32 [N, T]; 0 outside the mask.
    """
    chex.assert_rank(mask, 2)
    mask = mask.astype(bool)
    weights = sequence_weights(mask.sum(-1), mode, norm_constant, row_weights)
    return weights[:, None] * mask
