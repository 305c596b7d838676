"""The update that training would run, lowered and compiled for devices that are not there."""

import dataclasses
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.binding import ConfigError
from manus_jax.learner.learner import LearnerSpec
from manus_jax.learner.mesh import batch_sharding, replicated
from manus_jax.learner.update import TrainState, make_update, state_shardings
from manus_jax.planning.chips import GIB

_NO_FIELDS = ("mask", "segment_ids", "entropy")
# The compiler says so early, or after it has tried to make do.
_OUT_OF_MEMORY = re.compile(r"(?:HLO temporaries \(|Used )([\d.]+)([KMG])")
_UNITS = {"K": 2.0**10, "M": 2.0**20, "G": GIB}
CRITIC_FIELDS = ("values", "returns")


class DoesNotFit(Exception):
    """The compiler's own verdict: the program needs `peak` bytes of a chip."""

    def __init__(self, peak: float):
        super().__init__(f"needs {peak / GIB:.2f} GiB")
        self.peak = peak


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """What the state takes of one device, by its shardings: exact, before anything is compiled."""

    parameters: int
    optimizer: int
    batch: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device while the compiled update runs; the state's buffers are reused."""

    arguments: int
    outputs: int
    reused: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.reused + self.temporaries + self.code


def policy_fields(recipe: Recipe) -> tuple[str, ...]:
    """The per-token fields that training packs for the recipe's update."""
    return tuple(f for f in recipe.loss_fields if f not in _NO_FIELDS)


def abstract_arguments(
    design: LearnerSpec, mesh: Mesh, fields: Sequence[str]
) -> tuple[TrainState, dict[str, Any], Any]:
    """Shapes and placements of what `update(state, batch, used)` takes."""
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    opt_state = jax.eval_shape(design.optimizer.init, design.shapes)
    state = TrainState(design.shapes, opt_state, counter, counter)
    placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    shardings = state_shardings(design.shapes, design.optimizer, mesh)
    types = {name: jnp.int32 for name in ("input_ids", "segment_ids", "positions")}
    types |= {"loss_mask": jnp.bool_, "loss_weights": jnp.float32}
    types |= {name: jnp.float32 for name in fields}
    shape = (design.update_micro_batches, design.row_shape.rows, design.row_shape.length)
    rows = batch_sharding(mesh)
    batch = {name: jax.ShapeDtypeStruct(shape, t, sharding=rows) for name, t in types.items()}
    return (
        jax.tree.map(placed, state, shardings),
        batch,
        jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh)),
    )


def state_bytes(design: LearnerSpec, mesh: Mesh, fields: Sequence[str]) -> StateBytes:
    state, batch, _ = abstract_arguments(design, mesh, fields)
    return StateBytes(*(_per_device(tree) for tree in (state.params, state.opt_state, batch)))


def _per_device(tree: Any) -> int:
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def lower_update(
    design: LearnerSpec, mesh: Mesh, fields: Sequence[str], platform: str | None = None
) -> jax.stages.Lowered:
    """The very update of training, lowered for the mesh's devices, or for another `platform`."""
    update: Any = make_update(design.objective, design.optimizer, mesh, design.shapes)
    traced = update.trace(*abstract_arguments(design, mesh, fields))
    return traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()


def compile_update(lowered: jax.stages.Lowered) -> tuple[Memory, str]:
    """Memory and text of the compiled update; `DoesNotFit` where the compiler gives up on it."""
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
            f"libtpu {version('libtpu')} writes programs that jaxlib {version('jaxlib')} cannot "
            "read; take the one that goes with it: pip install 'manus-jax[plan]'"
        ) from None
    assert stats is not None and text is not None
    memory = Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )
    return memory, text
