"""Lowers and compiles the programs that training runs, for devices that are not present."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from manus_jax.config.binding import ConfigError
from manus_jax.learner.learner import LearnerSpec
from manus_jax.learner.mesh import HOST_MEMORY, batch_sharding, param_shardings, replicated
from manus_jax.learner.update import TrainState, make_update, state_shardings
from manus_jax.planning.chips import GIB

# The TPU compiler reports this before or after trying to save memory.
_OUT_OF_MEMORY = re.compile(r"(?:HLO temporaries \(|Used )([\d.]+)([KMG])")
_UNITS = {"K": 2.0**10, "M": 2.0**20, "G": GIB}


class DoesNotFit(Exception):
    """The compiler refused the program, which needs `peak` bytes on one chip."""

    def __init__(self, peak: float):
        super().__init__(f"needs {peak / GIB:.2f} GiB")
        self.peak = peak


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of state and batch on one device, from their shardings.

    `optimizer_on_host` is the part of the optimizer's state that is in host memory between updates,
    `frozen` the base of adapters.
    """

    parameters: int
    optimizer: int
    batch: int
    optimizer_on_host: int = 0
    frozen: int = 0


def abstract_arguments(
    spec: LearnerSpec, mesh: Mesh, micro_batches: int | None = None
) -> tuple[Any, ...]:
    """Shapes and shardings of the arguments of `update(state, batch, used, *frozen)`.

    `micro_batches` are those of an update, if not given.
    """
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    opt_state = jax.eval_shape(spec.optimizer.init, spec.shapes)
    state = TrainState(spec.shapes, opt_state, counter, counter)
    placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    shardings = state_shardings(spec.shapes, spec.optimizer, mesh, spec.optimizer_on_host)
    types = {name: jnp.int32 for name in ("input_ids", "segment_ids", "positions")}
    types |= {"loss_mask": jnp.bool_, "loss_weights": jnp.float32}
    types |= {name: jnp.float32 for name in spec.columns}
    shape = (micro_batches or spec.update_micro_batches, spec.row_shape.rows, spec.row_shape.length)
    rows = batch_sharding(mesh)
    batch = {name: jax.ShapeDtypeStruct(shape, t, sharding=rows) for name, t in types.items()}
    for name in spec.replayed:
        routed = (*shape, *(spec.routing or ()))
        batch[name] = jax.ShapeDtypeStruct(routed, jnp.int16, sharding=rows)
    used = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    frozen = [jax.tree.map(placed, x, param_shardings(x, mesh)) for x in spec.frozen]
    return jax.tree.map(placed, state, shardings), batch, used, *frozen


def state_bytes(spec: LearnerSpec, mesh: Mesh) -> StateBytes:
    state, batch, _, *frozen = abstract_arguments(spec, mesh)
    return StateBytes(
        parameters=_per_device(state.params),
        optimizer=_per_device(state.opt_state),
        batch=_per_device(batch),
        optimizer_on_host=_per_device(state.opt_state, on_host=True),
        frozen=_per_device(frozen),
    )


def _per_device(tree: Any, on_host: bool = False) -> int:
    """Bytes of one device's shards that are in its own memory, or in that of its host."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if (x.sharding.memory_kind == HOST_MEMORY) == on_host
    )


def lower_update(spec: LearnerSpec, mesh: Mesh, platform: str | None = None) -> jax.stages.Lowered:
    """The update of training, lowered for the devices of the mesh or for another `platform`."""
    update: Any = make_update(
        spec.objective,
        spec.optimizer,
        mesh,
        spec.shapes,
        spec.optimizer_on_host,
        spec.frozen,
        spec.in_place,
    )
    traced = update.trace(*abstract_arguments(spec, mesh))
    return traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()


def compile_program(lowered: jax.stages.Lowered) -> tuple[Any, str]:
    """Memory statistics and HLO text of a compiled program; may raise `DoesNotFit`."""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = _OUT_OF_MEMORY.search(str(error))
        if found is None:
            raise
        raise DoesNotFit(float(found[1]) * _UNITS[found[2]]) from None
    try:
        stats, text = compiled.memory_analysis(), compiled.as_text()
    except jax.errors.JaxRuntimeError:
        raise ConfigError(
            "the installed libtpu does not match jaxlib; install the version that does: "
            "pip install 'manus-jax[plan]'"
        ) from None
    assert text is not None
    return stats, text


def new_outputs(stats: Any) -> int:
    """Bytes of the outputs that do not overwrite arguments."""
    return stats.output_size_in_bytes - stats.alias_size_in_bytes


def peak_bytes(stats: Any) -> int:
    """Bytes on one device while a compiled program runs."""
    allocated = stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    return stats.argument_size_in_bytes + new_outputs(stats) + allocated
