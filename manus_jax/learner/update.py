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
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from manus_jax.learner.meeting import compiled_by_all
from manus_jax.learner.mesh import (
    batch_sharding,
    check_batch,
    optimizer_shardings,
    param_shardings,
    replicated,
)
from manus_jax.learner.packing import Packed

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
    """The state around `params`, which are taken over (copied only to where they belong)."""
    shardings = state_shardings(params, optimizer, mesh)
    params = jax.device_put(params, shardings.params)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    zero = jnp.zeros((), jnp.int32, device=shardings.step)
    return TrainState(params, opt_state, zero, jnp.copy(zero))


def put_batch(packed: Packed, mesh: Mesh) -> tuple[Batch, jax.Array]:
    """A packed batch on the mesh, split over it, and how many micro-batches it uses.

    Of several processes all call this in step, with arrays of the same names and shapes; the batch
    is that of process 0.
    """
    _, rows, length = packed.arrays["input_ids"].shape
    check_batch(rows, length, mesh)
    batch = (packed.arrays, np.int32(packed.used))
    shardings = (batch_sharding(mesh), replicated(mesh))
    if jax.process_count() == 1:
        return jax.device_put(batch, shardings)
    arrays, used = multihost_utils.broadcast_one_to_all(batch)
    place = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index])
    return {name: place(x, shardings[0]) for name, x in arrays.items()}, place(used, shardings[1])


def _micro_batch(batch: Batch, index: Any) -> Batch:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def accumulate(
    objective: Objective, params: Params, batch: Batch, used: jax.Array
) -> tuple[Params, jax.Array, dict[str, jax.Array]]:
    """Gradient (float32), loss and metric sums over the first `used` micro-batches."""

    grad = jax.value_and_grad(objective, has_aux=True)

    def body(index: jax.Array, carry: Any) -> Any:
        (loss, metrics), grads = grad(params, _micro_batch(batch, index))
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), carry, (grads, loss, metrics))

    loss_shape, metric_shapes = jax.eval_shape(objective, params, _micro_batch(batch, 0))
    init = _zeros((params, loss_shape, metric_shapes))
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

    jitted = jax.jit(
        update,
        in_shardings=(shardings, batch_sharding(mesh), replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )
    return compiled_by_all(jitted)


def make_evaluate(
    objective: Objective, mesh: Mesh, params: Params
) -> Callable[[Params, Batch, Any], dict[str, jax.Array]]:
    """Compiles `evaluate(params, batch, used) -> metric sums` of an objective, with no gradient."""

    def evaluate(params: Params, batch: Batch, used: jax.Array) -> dict[str, jax.Array]:
        def body(index: jax.Array, sums: Any) -> Any:
            _, metrics = objective(params, _micro_batch(batch, index))
            return jax.tree.map(jnp.add, sums, metrics)

        _, shapes = jax.eval_shape(objective, params, _micro_batch(batch, 0))
        return jax.lax.fori_loop(0, used, body, _zeros(shapes))

    jitted = jax.jit(
        evaluate,
        in_shardings=(param_shardings(params, mesh), batch_sharding(mesh), replicated(mesh)),
        out_shardings=replicated(mesh),
    )
    return compiled_by_all(jitted)


def make_forward(
    function: Callable[[Params, Batch], jax.Array], mesh: Mesh, params: Params
) -> Callable[[Params, Batch, Any], jax.Array]:
    """Compiles `forward(params, batch, used) -> float32 [micro_batches, rows, length]`.

    `function` maps a micro-batch to float32 [rows, length]: log-probs or values. Of several
    processes each gets the whole of it.
    """
    split = jax.process_count() == 1

    def forward(params: Params, batch: Batch, used: jax.Array) -> jax.Array:
        def body(index: jax.Array, out: jax.Array) -> jax.Array:
            rows = function(params, _micro_batch(batch, index))
            return jax.lax.dynamic_update_index_in_dim(out, rows, index, 0)

        out = jnp.zeros(batch["input_ids"].shape, jnp.float32)
        return jax.lax.fori_loop(0, used, body, out)

    jitted = jax.jit(
        forward,
        in_shardings=(param_shardings(params, mesh), batch_sharding(mesh), replicated(mesh)),
        out_shardings=batch_sharding(mesh) if split else replicated(mesh),
    )
    return compiled_by_all(jitted)
