"""Finds the nearest settings that fit when a plan does not.

Candidates change the mesh, the remat policy and the rows of a micro-batch; none of them changes
the result of an update. They are ranked by estimates, scaled to the memory that the given plan
turned out to need, and the best are planned in full until one fits. If none does, the same is tried
with less state on the chips (docs/memory.md): the reference policy on the host, then Adafactor,
then adapters. The last two change the result.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
    REFERENCE,
    Plan,
    UpdatePlan,
    for_platform,
    make_plan,
    plan_mesh,
    workload_of,
)
from manus_jax.planning.programs import ENGINE
from manus_jax.planning.topologies import Topology
from manus_jax.training.learner_specs import make_recipe, policy_spec

_MAX_PLANS = 4
_FREE = 0.04  # share of the memory that a candidate's estimate must leave free
_ROWS_PER_SHARD = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_DOUBLINGS = 10
_LESS_STATE: tuple[dict[str, Any], ...] = (
    {"algorithm.reference": "host"},
    {
        "optimizer.name": "adafactor",
        "algorithm.reference": "host",
        "algorithm.reference_dtype": "bfloat16",
    },
    # The reference is then the frozen base, which these settings do not apply to.
    {"lora.rank": 32, "algorithm.reference": "device", "algorithm.reference_dtype": "float32"},
)


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
    config, limit = for_platform(config, topology), (1 - _FREE) * topology.usable
    for base, changes in ((config, []), *_with_less_state(config)):
        found = _candidates(base, changes, arch, topology, trained, plan)
        candidates = [c for c in found if c.needed <= limit]
        candidates.sort(key=lambda c: (len(c.lines), c.seconds))
        for candidate in candidates[:_MAX_PLANS]:
            report(f"trying {', '.join(candidate.lines)}")
            planned = make_plan(candidate.config, arch, topology, trained)
            if planned.fits:
                return planned, candidate.lines
    return None


def enough_chips(plan: Plan) -> int | None:
    """How many chips would hold the run with FSDP and a row on each, by estimates, if any do."""
    topology, fullest = plan.topology, max(plan.updates, key=lambda u: u.needed)
    w, scale = fullest.workload, _compiled_to_estimated(fullest, topology)
    engine = fullest.resident.get(ENGINE, 0.0)
    state = (
        w.parameter_shards * w.tensor * (fullest.fixed + sum(fullest.resident.values()) - engine)
    )
    for doublings in range(1, _DOUBLINGS):
        count = topology.count * 2**doublings
        shards = {"data": 1, "fsdp": count, "sequence": 1, "tensor": 1}
        larger = dataclasses.replace(w, shards=shards, rows=count, remat="full")
        needed = state / count + engine
        needed += scale * estimates.estimate_temporaries(larger, topology.platform).total
        if needed <= (1 - _FREE) * topology.usable and plan.arch.hidden_size % count == 0:
            return count
    return None


def _with_less_state(config: TrainConfig) -> Iterator[tuple[TrainConfig, list[str]]]:
    """Settings that keep less on the chips, and their bindings."""
    if config.lora.rank is not None:
        return
    has_reference = make_recipe(config.algorithm).needs_reference
    for settings in _LESS_STATE:
        changed, lines = config, []
        for binding, value in settings.items():
            section, _, name = binding.partition(".")
            old = getattr(changed, section)
            if getattr(old, name) == value or (section == "algorithm" and not has_reference):
                continue
            with contextlib.suppress(ConfigError):  # Adafactor does not read AdamW's settings
                new = dataclasses.replace(old, **{name: value})
                changed = dataclasses.replace(changed, **{section: new})
                lines.append(f"{binding} = {value!r}")
        if lines:
            yield changed, lines


def _compiled_to_estimated(update: UpdatePlan, topology: Topology) -> float:
    guess = estimates.estimate_temporaries(update.workload, topology.platform).total
    return max(1.0, (update.peak - update.fixed) / guess)


def _candidates(
    config: TrainConfig,
    changes: list[str],
    arch: Architecture,
    topology: Topology,
    trained: float,
    plan: Plan,
) -> Iterator[_Candidate]:
    """Meshes, remat policies and rows for `config`, to which `changes` have already led."""
    fullest = max(plan.updates, key=lambda u: u.needed)
    scale = _compiled_to_estimated(fullest, topology)
    resident = sum(x for n, x in fullest.resident.items() if n != REFERENCE)
    on_chips = config.algorithm.reference == "device" and config.lora.rank is None
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
            lines = [*changes, *(f"mesh.{axis} = {size}" for axis, size in sizes.items())]
            lines += [f"compute.remat = '{remat}'"] if remat != config.compute.remat else []
            lines += [f"data.rows = {rows}"] if rows != config.data.rows else []
            if not lines:
                continue
            changed = dataclasses.replace(
                _with_rows(shaped, rows), compute=dataclasses.replace(config.compute, remat=remat)
            )
            w = workload_of(changed, arch, mesh, fullest.name == "policy", trained)
            fixed = 2 * state.parameters + state.optimizer + state.frozen
            needed = fixed + resident
            if on_chips and REFERENCE in fullest.resident:
                half = 2 if config.algorithm.reference_dtype == "bfloat16" else 1
                needed += state.parameters / half
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
