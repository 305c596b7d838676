"""The compiled update: a loop over packed micro-batches, one optimizer step, donated state.

An objective returns a micro-batch's share of the loss, already divided by the denominators of the
whole batch (stored in the batch as per-token weights). The gradient is therefore the sum over
micro-batches and does not depend on how the batch is split. Gradients accumulate in float32. An
update whose loss, gradient norm or step length is not finite is skipped: it only increments the
count of skipped updates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from manus_jax.errors import UserError
from manus_jax.learner.mesh import (
    HOST_MEMORY,
    batch_sharding,
    check_batch,
    optimizer_shardings,
    param_shardings,
    path_name,
    replicated,
)
from manus_jax.learner.processes import compile_on_all
from manus_jax.models.layer_gradients import attach, layers_of, with_layers
from manus_jax.models.lora import join

Params = Any
Batch = dict[str, jax.Array]
Frozen = tuple[Params, ...]  # none, or one tree
# (params, micro_batch) -> (loss share, sums of metrics over the micro-batch's trained tokens)
Objective = Callable[[Params, Batch], tuple[jax.Array, dict[str, jax.Array]]]


# The TPU compiler has no reduce-scatter for all chips of a slice and all-reduces gradients, which
# sends twice as much. This setting passes parts of a gradient around a ring while computing others.
_TPU_OPTIONS = {"xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd"}


class TrainState(NamedTuple):
    """The state that an update changes. `skipped` counts updates that are not finite."""

    params: Params
    opt_state: Any
    step: Any
    skipped: Any


def state_shardings(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh, on_host: bool = False
) -> TrainState:
    """The sharding of each part of the state, from parameter shapes alone.

    With `on_host`, the arrays of the optimizer are in pinned host memory between updates.
    """
    opt_state = jax.eval_shape(optimizer.init, params)
    placed = optimizer_shardings(opt_state, params, mesh)
    if on_host:
        to_host = lambda x, s: s.with_memory_kind(HOST_MEMORY) if x.ndim else s
        placed = jax.tree.map(to_host, opt_state, placed)
    return TrainState(
        params=param_shardings(params, mesh),
        opt_state=placed,
        step=replicated(mesh),
        skipped=replicated(mesh),
    )


def abstract_state(state: TrainState, shardings: TrainState) -> TrainState:
    """The shapes and dtypes of `state` (arrays or shapes) with the given shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )


def init_state(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh, on_host: bool = False
) -> TrainState:
    """The initial state; `params` are moved to their shardings and must not be used afterwards."""
    shardings = state_shardings(params, optimizer, mesh, on_host)
    params = jax.device_put(params, shardings.params)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    zero = jnp.zeros((), jnp.int32, device=shardings.step)
    return TrainState(params, opt_state, zero, jnp.copy(zero))


def put_shards(
    shape: tuple[int, ...], sharding: Any, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """An array of which each process transfers the slices of its own devices, explicitly."""
    places = sharding.addressable_devices_indices_map(shape)
    shards = [jax.device_put(read(index), device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def put_batch(arrays: dict[str, np.ndarray], used: int, mesh: Mesh) -> tuple[Batch, jax.Array]:
    """Packed arrays [micro_batches, rows, length] on the mesh, and the number of used ones.

    With several processes, all pass the same arrays, and each transfers its own shards.
    """
    _, rows, length = arrays["input_ids"].shape
    check_batch(rows, length, mesh)
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put((arrays, np.int32(used)), (sharding, replicated(mesh)))
    place = lambda x, s: put_shards(x.shape, s, lambda index: x[index])
    batch: Batch = {name: place(x, sharding) for name, x in arrays.items()}
    return batch, place(np.asarray(used, np.int32), replicated(mesh))


def _micro_batch(batch: Batch, index: Any) -> Batch:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def accumulate(
    objective: Objective, params: Params, batch: Batch, used: jax.Array, in_place: bool = False
) -> tuple[Params, jax.Array, dict[str, jax.Array]]:
    """Gradient (float32), loss and metric sums over the first `used` micro-batches.

    With `in_place`, the backward pass adds the gradients of layers to their sums.
    """

    def body(index: jax.Array, carry: Any) -> Any:
        rows, sums = _micro_batch(batch, index), carry[0]
        of = lambda params: objective(attach(params, sums) if in_place else params, rows)
        (loss, metrics), grads = jax.value_and_grad(of, has_aux=True)(params)
        new = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), carry, (grads, loss, metrics))
        return (with_layers(new[0], layers_of(grads)), *new[1:]) if in_place else new

    loss_shape, metric_shapes = jax.eval_shape(objective, params, _micro_batch(batch, 0))
    init = _zeros((params, loss_shape, metric_shapes))
    return jax.lax.fori_loop(0, used, body, init)


class WeightsError(UserError, ValueError):
    """Weights that are not finite."""


def require_finite(params: Params, name: str) -> None:
    """Raises unless all parameters are finite; `name` says what they are in the message."""
    finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(params)
    for path, ok in jax.tree_util.tree_leaves_with_path(finite):
        if not ok:
            raise WeightsError(f"{name} has weights that are not finite, in {path_name(path)}")


def make_update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    params: Params,
    on_host: bool = False,
    frozen: Frozen = (),
    in_place: bool = False,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Compiles `update(state, batch, used, *frozen) -> (state, metrics)` for these shapes.

    `params` are trained; `frozen` parameters complete them, without gradients (`models.lora`).

    The returned metrics are the objective's sums, plus `loss`, `grad_norm` and `update_skipped`.
    With `on_host`, the optimizer's state comes to the devices for its step only. With `in_place`,
    gradients are summed in the backward pass, unless parameters are frozen.
    """
    in_place = in_place and not frozen
    shardings = state_shardings(params, optimizer, mesh, on_host)
    on_device = state_shardings(params, optimizer, mesh).opt_state

    def update(
        state: TrainState, batch: Batch, used: jax.Array, *frozen: Params
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        of_trained = lambda params, rows: objective(join(params, *frozen), rows)
        grads, loss, metrics = accumulate(of_trained, state.params, batch, used, in_place)
        norm = optax.tree.norm(grads)
        old = jax.device_put(state.opt_state, on_device) if on_host else state.opt_state
        updates, opt_state = optimizer.update(grads, old, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(jnp.stack([norm, loss, optax.tree.norm(updates)])).all()
        keep = lambda new, old: jnp.where(finite, new, old)
        new = TrainState(
            params=jax.tree.map(keep, params, state.params),
            opt_state=jax.tree.map(keep, opt_state, old),
            step=state.step + 1,
            skipped=state.skipped + (1 - finite.astype(jnp.int32)),
        )
        bad = 1.0 - finite.astype(jnp.float32)
        return new, {**metrics, "loss": loss, "grad_norm": norm, "update_skipped": bad}

    jitted = jax.jit(
        update,
        in_shardings=(
            shardings,
            batch_sharding(mesh),
            replicated(mesh),
            *(param_shardings(x, mesh) for x in frozen),
        ),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
        compiler_options=_TPU_OPTIONS if mesh.devices.flat[0].platform == "tpu" else None,
    )
    return compile_on_all(jitted)


def make_evaluate(
    objective: Objective, mesh: Mesh, params: Params, frozen: Frozen = ()
) -> Callable[..., dict[str, jax.Array]]:
    """Compiles `evaluate(params, batch, used, *frozen) -> metric sums`, without gradients."""

    def evaluate(
        params: Params, batch: Batch, used: jax.Array, *frozen: Params
    ) -> dict[str, jax.Array]:
        params = join(params, *frozen)

        def body(index: jax.Array, sums: Any) -> Any:
            _, metrics = objective(params, _micro_batch(batch, index))
            return jax.tree.map(jnp.add, sums, metrics)

        _, shapes = jax.eval_shape(objective, params, _micro_batch(batch, 0))
        return jax.lax.fori_loop(0, used, body, _zeros(shapes))

    jitted = jax.jit(
        evaluate,
        in_shardings=_forward_shardings(params, mesh, frozen),
        out_shardings=replicated(mesh),
    )
    return compile_on_all(jitted)


def make_forward(
    function: Callable[[Params, Batch], jax.Array],
    mesh: Mesh,
    params: Params,
    frozen: Frozen = (),
) -> Callable[..., jax.Array]:
    """Compiles `forward(params, batch, used, *frozen) -> float32 [micro_batches, rows, length]`.

    `function` maps a micro-batch to float32 [rows, length]: log-probs or values. With several
    processes, each gets the full result.
    """
    split = jax.process_count() == 1

    def forward(params: Params, batch: Batch, used: jax.Array, *frozen: Params) -> jax.Array:
        params = join(params, *frozen)

        def body(index: jax.Array, out: jax.Array) -> jax.Array:
            rows = function(params, _micro_batch(batch, index))
            return jax.lax.dynamic_update_index_in_dim(out, rows, index, 0)

        out = jnp.zeros(batch["input_ids"].shape, jnp.float32)
        return jax.lax.fori_loop(0, used, body, out)

    jitted = jax.jit(
        forward,
        in_shardings=_forward_shardings(params, mesh, frozen),
        out_shardings=batch_sharding(mesh) if split else replicated(mesh),
    )
    return compile_on_all(jitted)


def _forward_shardings(params: Params, mesh: Mesh, frozen: Frozen) -> tuple[Any, ...]:
    rows = batch_sharding(mesh), replicated(mesh)
    return (param_shardings(params, mesh), *rows, *(param_shardings(x, mesh) for x in frozen))
