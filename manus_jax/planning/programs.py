"""The programs of a step besides the updates, and the memory of each on a chip.

While a program runs, the arguments of the others stay where they are. The largest sum, over these
programs and the updates, decides whether a run fits.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from manus_jax.engines.cached_decoder import CachedDecoder
from manus_jax.learner.learner import LearnerSpec
from manus_jax.learner.mesh import path_name
from manus_jax.learner.update import make_forward
from manus_jax.planning import estimates
from manus_jax.planning.compiling import (
    DoesNotFit,
    StateBytes,
    abstract_arguments,
    compile_program,
    new_outputs,
    peak_bytes,
)
from manus_jax.planning.estimates import Workload
from manus_jax.planning.topologies import Topology

ENGINE = "embedded engine"
FROZEN = "frozen base"
_ROW_COLUMNS = ("input_ids", "segment_ids", "positions", "loss_mask")


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """Bytes on one chip while a program runs: its own, and those of `resident` arrays by name."""

    name: str
    own: float
    resident: Mapping[str, float]

    @property
    def needed(self) -> float:
        return self.own + sum(self.resident.values())


def plan_programs(
    models: Mapping[str, tuple[LearnerSpec, Workload, StateBytes]],
    residents: Mapping[str, float],
    reference_dtype: str | None,
    engine_itemsize: int,
    mesh: Mesh,
    topology: Topology,
) -> tuple[ProgramPlan, ...]:
    """Forward passes, and the transfer of weights to an engine.

    `residents` are the arrays that stay on a chip during a step, by name. `reference_dtype` is None
    without a reference policy, `engine_itemsize` that of the type in which the engine gets its
    weights.
    """
    besides = lambda *own: {n: x for n, x in residents.items() if n not in (*own, FROZEN)}
    peaks = {
        name: _forward_peak(spec, w, state, mesh, topology)
        for name, (spec, w, state) in models.items()
    }
    found = [ProgramPlan("old log-probs", peaks["policy"], besides("policy parameters"))]
    if reference_dtype:  # a reference on the host is on the chips for this program only
        rest, own = besides("reference policy"), peaks["policy"]
        spec, w, state = models["policy"]
        if reference_dtype == "bfloat16" and not spec.frozen:
            narrow = lambda x: jax.ShapeDtypeStruct(x.shape, reference_dtype)
            spec = dataclasses.replace(spec, shapes=jax.tree.map(narrow, spec.shapes))
            state = dataclasses.replace(state, parameters=state.parameters // 2)
            own = _forward_peak(spec, w, state, mesh, topology)
        found.append(ProgramPlan("reference log-probs", own, rest))
    if "critic" in models:
        found.append(ProgramPlan("values", peaks["critic"], besides("critic parameters")))
    if topology.processes > 1:
        policy = models["policy"][0]
        gathered = _largest_gathered((policy.shapes, policy.frozen), engine_itemsize)
        found.append(ProgramPlan("gathering of weights", gathered, dict(residents)))
    return tuple(found)


def plan_engine(
    decoder: CachedDecoder, residents: Mapping[str, float], topology: Topology
) -> tuple[ProgramPlan, ...]:
    """The programs of the embedded engine, and the arrival of new weights beside the old ones.

    Layers are unrolled, so programs are compiled with two of them: the others use the same
    temporaries again, and their code has the same size. Programs are not compiled if the engine has
    only some of the chips, those of process 0.
    """
    layout = decoder.layout
    held, rest = float(layout.device_bytes), {n: x for n, x in residents.items() if n != ENGINE}
    found = [ProgramPlan("engine: new weights", held + layout.weight_bytes, rest)]
    if not topology.compiles or layout.mesh.size != topology.count:
        return tuple(found)
    arch = dataclasses.replace(layout.arch, num_layers=min(2, layout.arch.num_layers))
    shallow = dataclasses.replace(decoder, layout=dataclasses.replace(layout, arch=arch))
    for name, (program, arguments) in shallow.programs().items():
        try:
            stats, _ = compile_program(program.lower(*arguments))
            code = stats.generated_code_size_in_bytes * layout.arch.num_layers / arch.num_layers
            more = stats.temp_size_in_bytes + new_outputs(stats) + code
        except DoesNotFit as refused:
            more = refused.peak - shallow.layout.device_bytes
        found.append(ProgramPlan(f"engine: {name}", held + more, rest))
    return tuple(found)


def _forward_peak(
    spec: LearnerSpec, w: Workload, state: StateBytes, mesh: Mesh, topology: Topology
) -> float:
    """Bytes of the forward pass over the rows of a step."""
    arguments, batch, used, *frozen = abstract_arguments(spec, mesh, spec.forward_micro_batches)
    rows = {name: batch[name] for name in (*_ROW_COLUMNS, *spec.replayed)}
    forward: Any = make_forward(spec.forward, mesh, spec.shapes, spec.frozen)
    if not topology.compiles:
        return state.parameters + state.frozen + estimates.estimate_forward(w, topology.platform)
    lowered = forward.trace(arguments.params, rows, used, *frozen).lower()
    try:
        return float(peak_bytes(compile_program(lowered)[0]))
    except DoesNotFit as refused:
        return refused.peak


def _largest_gathered(shapes: Any, itemsize: int) -> float:
    """The largest array that is whole on every chip while process 0 collects the weights.

    Arrays of stacked layers are gathered one layer at a time.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    stacked = lambda path: "layers" in path_name(path).split("/")
    return max(float(itemsize) * math.prod(x.shape[stacked(path) :]) for path, x in leaves)


def host_memory(
    engine_weights: float, on_host: Mapping[str, float], topology: Topology
) -> dict[str, float]:
    """Bytes in the memory of process 0's host, by purpose; `on_host` are those of one chip."""
    found: dict[str, float] = {}
    if topology.processes > 1:
        found["weights, gathered for the engine"] = engine_weights
    chips = topology.count / topology.processes
    return found | {name: chips * size for name, size in on_host.items() if size}
