"""The objectives that an update minimises: supervised loss, policy loss, value loss.

Each objective runs the model on a micro-batch of packed rows. It returns the sum of the per-token
losses times the batch's `loss_weights`, which include the global denominators, and sums of
per-token metrics over the trained tokens. Objectives are independent of the algorithm: a policy
loss is passed in as a function of log-probs and fields.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from manus_jax.algorithms.losses import value_loss
from manus_jax.learner.update import Batch, Objective, Params
from manus_jax.models.transformer import Critic, Transformer
from manus_jax.models.vocabulary import sharded_log_probs

TOKENS = "tokens"
PolicyLoss = Callable[[jax.Array, Mapping[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]]


def _rows(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    return batch["input_ids"], batch["segment_ids"], batch["positions"]


def log_probs_of(
    graphdef: nnx.GraphDef[Transformer],
    params: Params,
    batch: Batch,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of the trained tokens, float32 [rows, length]."""
    return _run(nnx.merge(graphdef, params), batch, temperature, with_entropy)


def _run(
    model: Transformer, batch: Batch, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[jax.Array, jax.Array]:
    hidden = model.backbone(*_rows(batch), batch.get("routed_experts"))
    return sharded_log_probs(
        hidden,
        model.head(),
        batch["input_ids"],
        batch["loss_mask"],
        model.backbone.compute.kernel.mesh,
        temperature,
        with_entropy,
    )


def _sums(mask: jax.Array, stats: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    sums = {name: jnp.sum(jnp.where(mask, x, 0.0)) for name, x in stats.items()}
    return {**sums, TOKENS: jnp.sum(mask.astype(jnp.float32))}


def _balanced(
    model: Transformer, batch: Batch, loss: jax.Array, stats: dict[str, jax.Array], weight: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Adds the load-balancing loss of a model with experts, which has run, and the metric.

    It counts as much as the micro-batch does in the loss of the update.
    """
    if not model.backbone.arch.num_experts:
        return loss, stats
    imbalance = model.backbone.imbalance[...]
    if weight:
        loss = loss + weight * jnp.sum(batch["loss_weights"]) * imbalance
    return loss, {**stats, "load_imbalance": jnp.full(batch["loss_mask"].shape, imbalance)}


def supervised(graphdef: nnx.GraphDef[Transformer], load_balancing: float = 0.0) -> Objective:
    """Cross-entropy of the trained tokens."""

    def objective(params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = nnx.merge(graphdef, params)
        log_probs, _ = _run(model, batch)
        loss, stats = -jnp.sum(batch["loss_weights"] * log_probs), {"nll": -log_probs}
        loss, stats = _balanced(model, batch, loss, stats, load_balancing)
        return loss, _sums(batch["loss_mask"], stats)

    return objective


def policy(
    graphdef: nnx.GraphDef[Transformer],
    loss: PolicyLoss,
    temperature: float = 1.0,
    with_entropy: bool = False,
    load_balancing: float = 0.0,
) -> Objective:
    """A policy loss on log-probs; the batch holds the fields that the loss needs."""

    def objective(params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = nnx.merge(graphdef, params)
        log_probs, entropy = _run(model, batch, temperature, with_entropy)
        fields: dict[str, Any] = {**batch, "mask": batch["loss_mask"], "entropy": entropy}
        loss_t, stats = loss(log_probs, fields)
        total = jnp.sum(batch["loss_weights"] * loss_t)
        total, stats = _balanced(model, batch, total, stats, load_balancing)
        return total, _sums(batch["loss_mask"], stats)

    return objective


def values_of(graphdef: nnx.GraphDef[Critic], params: Params, batch: Batch) -> jax.Array:
    """The critic's values, float32 [rows, length]."""
    return nnx.merge(graphdef, params)(*_rows(batch))


def critic(graphdef: nnx.GraphDef[Critic], cliprange: float) -> Objective:
    """Clipped value loss; the batch holds `returns` and the `values` before the update."""

    def objective(params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        values = values_of(graphdef, params, batch)
        loss_t, stats = value_loss(values, batch["values"], batch["returns"], cliprange)
        mask = batch["loss_mask"]
        loss_t = jnp.where(mask, loss_t, 0.0)
        return jnp.sum(batch["loss_weights"] * loss_t), _sums(mask, stats)

    return objective


def token_means(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Converts the metric sums of an update to means over its trained tokens, on the host."""
    host = {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
    tokens = host.pop(TOKENS)
    whole = {k: host.pop(k) for k in ("loss", "grad_norm", "update_skipped") if k in host}
    return {**whole, **{k: v / max(tokens, 1.0) for k, v in host.items()}, TOKENS: tokens}
