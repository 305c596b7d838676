"""Finds the nearest settings that fit when a plan does not.

Candidates change the mesh, the remat policy and the rows of a micro-batch; none of them changes
the result of an update. They are ranked by estimates, scaled to the memory that the given plan
turned out to need, and the best are planned in full until one fits.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import TrainConfig
from manus_jax.learner.mesh import MeshError, batch_shards
from manus_jax.models.architecture import Architecture, ModelError
from manus_jax.models.transformer import REMAT_POLICIES
from manus_jax.planning import estimates
from manus_jax.planning.compiling import state_bytes
from manus_jax.planning.plans import (
    FLOPS_UTILISATION,
    LINK_UTILISATION,
    Plan,
    for_platform,
    make_plan,
    plan_mesh,
    workload_of,
)
from manus_jax.planning.topologies import Topology
from manus_jax.training.learner_specs import make_recipe, policy_spec

_MAX_PLANS = 4
_FREE = 0.04  # share of the memory that a candidate's estimate must leave free
_ROWS_PER_SHARD = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class _Candidate(NamedTuple):
    config: TrainConfig
    lines: list[str]
    needed: float
    seconds: float


def nearest_that_fits(
    config: TrainConfig,
    arch: Architecture,
    topology: Topology,
    trained: float,
    plan: Plan,
    report: Callable[[str], None],
) -> tuple[Plan, list[str]] | None:
    """A plan that fits, and the gin bindings that lead to it; None if nothing fits.

    Takes the fewest changed settings, then the shortest time.
    """
    candidates = [
        c
        for c in _candidates(for_platform(config, topology), arch, topology, trained, plan)
        if c.needed <= (1 - _FREE) * topology.usable
    ]
    candidates.sort(key=lambda c: (len(c.lines), c.seconds))
    for candidate in candidates[:_MAX_PLANS]:
        report(f"trying {', '.join(candidate.lines)}")
        found = make_plan(candidate.config, arch, topology, trained)
        if found.fits:
            return found, candidate.lines
    return None


def _candidates(
    config: TrainConfig, arch: Architecture, topology: Topology, trained: float, plan: Plan
) -> Iterator[_Candidate]:
    fullest = max(plan.updates, key=lambda u: u.needed)
    guess = estimates.estimate_temporaries(fullest.workload, topology.platform).total
    scale = max(1.0, (fullest.peak - fullest.fixed) / guess)
    chip, recipe = topology.chip, make_recipe(config.algorithm)
    for sizes in _mesh_sizes(config, topology):
        shaped = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **sizes))
        try:
            divisible = _with_rows(shaped, topology.count)
            mesh = plan_mesh(divisible, topology)
            spec = policy_spec(divisible, recipe, arch, mesh)
            state = state_bytes(spec, mesh)
        except (MeshError, ModelError, ConfigError):
            continue
        shards = batch_shards(mesh)
        most = max(config.data.rows, shards)
        row_counts = [shards * n for n in _ROWS_PER_SHARD if shards * n <= most]
        for remat, rows in itertools.product(REMAT_POLICIES, row_counts):
            lines = [f"mesh.{axis} = {size}" for axis, size in sizes.items()]
            lines += [f"compute.remat = '{remat}'"] if remat != config.compute.remat else []
            lines += [f"data.rows = {rows}"] if rows != config.data.rows else []
            if not lines:
                continue
            changed = dataclasses.replace(
                _with_rows(shaped, rows), compute=dataclasses.replace(config.compute, remat=remat)
            )
            w = workload_of(changed, arch, mesh, fullest.name == "policy", trained)
            needed = 2 * state.parameters + state.optimizer + sum(fullest.resident.values())
            needed += scale * estimates.estimate_temporaries(w, topology.platform).total
            sent = sum(e.sent for e in estimates.estimate_exchanges(w))
            seconds = estimates.executed_flops(w) / (chip.flops * FLOPS_UTILISATION)
            seconds += sent / (chip.link * LINK_UTILISATION)
            yield _Candidate(changed, lines, needed, seconds)


def _with_rows(config: TrainConfig, rows: int) -> TrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, rows=rows))


def _mesh_sizes(config: TrainConfig, topology: Topology) -> Iterator[dict[str, int]]:
    """Changes of the mesh: none, then FSDP with parts given to the tensor and sequence axes."""
    yield {}
    for tensor, sequence in itertools.product((1, 2, 4, 8), repeat=2):
        sizes = {"data": topology.slices, "fsdp": -1, "tensor": tensor, "sequence": sequence}
        changed = {a: size for a, size in sizes.items() if getattr(config.mesh, a) != size}
        if changed:
            yield changed
