"""When a plan does not fit: the nearest settings that do.

Estimates rank the candidates, scaled to agree with what the plan at hand turned out to need; then
the best are planned in full until one fits. Near means: few settings changed, and little time
lost. What an update computes stays the same in all of them.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from jax.sharding import Mesh

from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import TrainConfig
from manus_jax.learner.mesh import MeshError, batch_shards
from manus_jax.models.architecture import Architecture, ModelError
from manus_jax.models.transformer import REMAT_POLICIES
from manus_jax.planning import estimates
from manus_jax.planning.compiling import policy_fields, state_bytes
from manus_jax.planning.plans import (
    Efficiency,
    Plan,
    for_platform,
    make_plan,
    plan_mesh,
    workload_of,
)
from manus_jax.planning.topologies import Topology
from manus_jax.training.learner_specs import design_policy, make_recipe

_TRIES = 4
# A share of the memory that estimates are asked to leave free.
_MARGIN = 0.04


@dataclasses.dataclass(frozen=True)
class Found:
    """A plan that fits, and the bindings that make it."""

    plan: Plan
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Candidate:
    config: TrainConfig
    lines: tuple[str, ...]
    needed: float
    seconds: float


def nearest_that_fits(
    config: TrainConfig,
    arch: Architecture,
    topology: Topology,
    trained: float,
    plan: Plan,
    say: Callable[[str], None],
) -> Found | None:
    """Searches remat policies, rows of a micro-batch and mesh shapes; None when nothing fits."""
    fullest = max(plan.updates, key=lambda u: u.needed)
    guess = estimates.estimate_memory(fullest.workload, fullest.state)
    state = fullest.state.parameters + fullest.state.optimizer
    real = fullest.peak - state - guess.gradients
    scale = max(1.0, real / guess.temporaries)
    beside = sum(fullest.resident.values())
    has_head = fullest.name == "policy"
    candidates = [
        c
        for c in _candidates(config, arch, topology, trained, scale, has_head, beside, plan)
        if c.needed <= (1 - _MARGIN) * topology.chip.usable
    ]
    candidates.sort(key=lambda c: (len(c.lines), c.seconds))
    for tried in candidates[:_TRIES]:
        say(f"trying {', '.join(tried.lines)}")
        found = make_plan(tried.config, arch, topology, trained, plan.efficiency)
        if found.fits:
            return Found(found, tried.lines)
    return None


def _candidates(
    config: TrainConfig,
    arch: Architecture,
    topology: Topology,
    trained: float,
    scale: float,
    has_head: bool,
    beside: float,
    plan: Plan,
) -> Iterator[_Candidate]:
    config = for_platform(config, topology)
    recipe = make_recipe(config.algorithm)
    for sizes in _mesh_sizes(config, topology):
        shaped = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **sizes))
        try:
            mesh = plan_mesh(_with_rows(shaped, topology.count), topology)
            design = design_policy(_with_rows(shaped, topology.count), recipe, arch, mesh)
            state = state_bytes(design, mesh, policy_fields(recipe))
        except (MeshError, ModelError, ConfigError):
            continue
        for remat, rows in itertools.product(REMAT_POLICIES, _row_counts(config, mesh)):
            changed = dataclasses.replace(
                _with_rows(shaped, rows), compute=dataclasses.replace(config.compute, remat=remat)
            )
            w = workload_of(changed, arch, mesh, has_head, trained)
            memory = estimates.estimate_memory(w, state)
            needed = state.parameters + state.optimizer + memory.gradients + beside
            lines = [f"mesh.{axis} = {size}" for axis, size in sizes.items()]
            lines += [f"compute.remat = '{remat}'"] if remat != config.compute.remat else []
            lines += [f"data.rows = {rows}"] if rows != config.data.rows else []
            if lines:
                yield _Candidate(
                    changed,
                    tuple(lines),
                    needed + scale * memory.temporaries,
                    _seconds(w, state, topology, plan.efficiency),
                )


def _with_rows(config: TrainConfig, rows: int) -> TrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, rows=rows))


def _row_counts(config: TrainConfig, mesh: Mesh) -> list[int]:
    """Counts of rows up to the present one that divide over the mesh."""
    shards = batch_shards(mesh)
    most = max(config.data.rows, shards)
    return [shards * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if shards * n <= most]


def _mesh_sizes(config: TrainConfig, topology: Topology) -> Iterator[dict[str, int]]:
    """The mesh as it is, all FSDP, and shares of it given to other axes."""
    yield {}
    for tensor, sequence in itertools.product((1, 2, 4, 8), repeat=2):
        sizes = {"data": topology.slices, "fsdp": -1, "tensor": tensor, "sequence": sequence}
        changed = {a: size for a, size in sizes.items() if getattr(config.mesh, a) != size}
        if changed:
            yield changed


def _seconds(
    w: estimates.Workload, state: estimates.StateBytes, topology: Topology, e: Efficiency
) -> float:
    chip = topology.chip
    links = sum(x.sent for x in estimates.estimate_exchanges(w)) / (chip.link * e.links)
    return (
        estimates.executed_flops(w) / (chip.flops * e.flops)
        + estimates.estimate_bytes(w, state) / (chip.bandwidth * e.memory)
        + links
    )
