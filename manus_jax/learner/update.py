"""The one compiled update: a loop over packed micro-batches, one optimizer step, donated state.

An objective gives a micro-batch's share of the loss, already divided by the whole batch's
denominators (they are per-token weights in the batch), so the gradient is the plain sum over
micro-batches and does not depend on how the batch was cut. Gradients add up in float32. A gradient
that is not finite changes nothing but the count of skipped updates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from manus_jax.learner.mesh import (
    MeshError,
    batch_sharding,
    batch_shards,
    optimizer_shardings,
    param_shardings,
    replicated,
)

Params = Any
Batch = dict[str, jax.Array]
# (params, micro_batch) -> (loss share, sums of metrics over the micro-batch's trained tokens)
Objective = Callable[[Params, Batch], tuple[jax.Array, dict[str, jax.Array]]]


class TrainState(NamedTuple):
    """Everything the update changes. `step` counts updates, `skipped` those with a bad gradient."""

    params: Params
    opt_state: Any
    step: Any
    skipped: Any


def state_shardings(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Where each part of the state lives, from parameter shapes alone."""
    opt_state = jax.eval_shape(optimizer.init, params)
    return TrainState(
        params=param_shardings(params, mesh),
        opt_state=optimizer_shardings(opt_state, params, mesh),
        step=replicated(mesh),
        skipped=replicated(mesh),
    )


def init_state(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state around `params`, which are taken over (not copied)."""
    shardings = state_shardings(params, optimizer, mesh)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    zero = jax.device_put(jnp.zeros((), jnp.int32), shardings.step)
    return TrainState(params, opt_state, zero, jnp.copy(zero))


def put_batch(arrays: dict[str, Any], mesh: Mesh) -> Batch:
    """Packed host arrays [micro_batches, rows, length] onto the mesh, rows split over it."""
    rows, shards = next(iter(arrays.values())).shape[1], batch_shards(mesh)
    if rows % shards:
        raise MeshError(
            f"{rows} rows per micro-batch are not divisible by "
            f"data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']} = {shards}"
        )
    return jax.device_put(arrays, batch_sharding(mesh))


def accumulate(
    objective: Objective, params: Params, batch: Batch, used: jax.Array
) -> tuple[Params, jax.Array, dict[str, jax.Array]]:
    """Gradient (float32), loss and metric sums over the first `used` micro-batches."""

    def at(index: Any) -> Batch:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch)

    grad = jax.value_and_grad(objective, has_aux=True)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)

    def body(index: jax.Array, carry: Any) -> Any:
        (loss, metrics), grads = grad(params, at(index))
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), carry, (grads, loss, metrics))

    loss_shape, metric_shapes = jax.eval_shape(objective, params, at(0))
    init = zeros((params, loss_shape, metric_shapes))
    return jax.lax.fori_loop(0, used, body, init)


def make_update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    params: Params,
) -> Callable[[TrainState, Batch, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """Compiles `update(state, batch, used) -> (state, metrics)` for `params` of these shapes.

    The returned metrics are the objective's sums, plus `loss`, `grad_norm` and `update_skipped`.
    """
    shardings = state_shardings(params, optimizer, mesh)

    def update(
        state: TrainState, batch: Batch, used: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, loss, metrics = accumulate(objective, state.params, batch, used)
        norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        keep = lambda new, old: jnp.where(finite, new, old)
        new = TrainState(
            params=jax.tree.map(keep, params, state.params),
            opt_state=jax.tree.map(keep, opt_state, state.opt_state),
            step=state.step + 1,
            skipped=state.skipped + (1 - finite.astype(jnp.int32)),
        )
        bad = 1.0 - finite.astype(jnp.float32)
        return new, {**metrics, "loss": loss, "grad_norm": norm, "update_skipped": bad}

    return jax.jit(
        update,
        in_shardings=(shardings, batch_sharding(mesh), replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )
