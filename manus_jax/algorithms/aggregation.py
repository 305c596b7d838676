"""Aggregation of per-token losses with global denominators.

Aggregation is a weight per token, computed once from the lengths of the whole batch before it is
split; the loss is `sum(weights * loss_t)`. A sum does not depend on micro-batches, rows, packing,
padding or devices, so neither does the update. The functions accept NumPy arrays (and return NumPy)
or JAX arrays, also under jit.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


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
      mode: one of MODES.
      norm_constant: the divisor of seq-mean-token-sum-norm, e.g. the maximum response length.
      row_weights: [N], 1 if None; 0 for padding rows.

    Returns:
      float32 [N]; all 0 if every sequence is ignored.
    """
    if mode not in MODES:
        raise ValueError(f"unknown loss aggregation {mode!r}; there are {', '.join(MODES)}")
    if mode == "seq-mean-token-sum-norm" and (norm_constant is None or norm_constant <= 0):
        raise ValueError(
            f"{mode} divides by norm_constant, which must be above 0; got {norm_constant}"
        )
    chex.assert_rank(lengths, 1)
    xp: Any = jnp if isinstance(lengths, jax.Array) else np
    counts = lengths > 0
    if row_weights is None:
        row_weights = xp.ones(lengths.shape, xp.float32)
    chex.assert_equal_shape([lengths, row_weights])
    weights = xp.where(counts, row_weights, 0.0)

    if mode == "token-mean":
        denominator = (weights * lengths).sum()
    else:
        denominator = weights.sum()
        if mode == "seq-mean-token-mean":
            weights = weights / xp.maximum(lengths, 1)
        elif mode == "seq-mean-token-sum-norm":
            weights = weights / norm_constant
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
