"""Aggregation of per-token losses with global denominators.

Aggregation is a weight per token, computed once on the host from the lengths of the whole batch,
before it is split; the loss is `sum(weights * loss_t)`. A sum does not depend on micro-batches,
rows, packing, padding or devices, so neither does the update.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from manus_jax.registry import Registry

Aggregation = Callable[[np.ndarray, np.ndarray, float | None], tuple[np.ndarray, Any]]
"""(1 for sequences with agent tokens, else 0 [N]; lengths [N]; norm_constant) → the weight of each
token of a sequence, [N], and the denominator of all weights."""

AGGREGATIONS: Registry[Aggregation] = Registry("loss aggregation")


@AGGREGATIONS.register("token-mean")
def _token_mean(
    counted: np.ndarray, lengths: np.ndarray, norm: float | None
) -> tuple[np.ndarray, Any]:
    return counted, (counted * lengths).sum()


@AGGREGATIONS.register("seq-mean-token-mean")
def _seq_mean_token_mean(
    counted: np.ndarray, lengths: np.ndarray, norm: float | None
) -> tuple[np.ndarray, Any]:
    return counted / np.maximum(lengths, 1), counted.sum()


@AGGREGATIONS.register("seq-mean-token-sum")
def _seq_mean_token_sum(
    counted: np.ndarray, lengths: np.ndarray, norm: float | None
) -> tuple[np.ndarray, Any]:
    return counted, counted.sum()


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def _seq_mean_token_sum_norm(
    counted: np.ndarray, lengths: np.ndarray, norm: float | None
) -> tuple[np.ndarray, Any]:
    if norm is None or norm <= 0:
        raise ValueError(
            f"seq-mean-token-sum-norm divides by norm_constant, which must be above 0; got {norm}"
        )
    return counted / norm, counted.sum()


def sequence_weights(
    lengths: np.ndarray, mode: str, norm_constant: float | None = None
) -> np.ndarray:
    """The weight of every agent token of each sequence, float32 [N], from their numbers, int [N].

    token-mean gives every token the same weight. seq-mean-* average over sequences the mean of the
    token losses (token-mean), their sum (token-sum), or their sum divided by `norm_constant`, e.g.
    the maximum response length (token-sum-norm). Sequences without agent tokens are ignored.
    """
    counted = (lengths > 0).astype(np.float32)
    weights, denominator = AGGREGATIONS[mode](counted, lengths, norm_constant)
    return (weights / np.where(denominator > 0, denominator, 1.0)).astype(np.float32)


def token_weights(mask: np.ndarray, mode: str, norm_constant: float | None = None) -> np.ndarray:
    """Weights [N, T] of the agent tokens in `mask` [N, T]; the loss is `sum(weights * loss_t)`."""
    mask = mask.astype(bool)
    return sequence_weights(mask.sum(-1), mode, norm_constant)[:, None] * mask
