"""The plan of a run as the command `plan` prints it, with the nearest settings that fit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from manus_jax.config.binding import bound_value
from manus_jax.config.commands import TrainConfig
from manus_jax.models.architecture import Architecture
from manus_jax.models.loading import scratch_architecture
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.plans import Plan, make_plan
from manus_jax.planning.search import enough_chips, nearest_that_fits
from manus_jax.planning.servers import VLLM_MEMORY_UTILIZATION, ServerPlan, plan_servers
from manus_jax.planning.tables import as_json, describe_servers, render
from manus_jax.planning.topologies import Topology, find_topology, missing_compiler
from manus_jax.training.learner_specs import check_lengths

Print = Callable[[str], None]


def report_plan(
    settings: TrainConfig,
    topology_name: str,
    slices: int,
    architecture: str | None,
    trained: float,
    show: Print,
    note: Print,
) -> dict[str, Any]:
    """Plans a run and returns the figures; `show` prints the plan and `note` the progress."""
    check_lengths(settings)
    arch = _architecture_of(settings, architecture)
    topology = find_topology(topology_name, slices, bound_value("vllm.learner_memory_fraction"))
    servers = _servers_of(settings, arch, topology)
    plan = make_plan(settings, arch, topology, trained)
    if not topology.compiles:
        note(missing_compiler(topology))
    show(render(plan))
    figures = as_json(plan)
    if servers is not None:
        show(describe_servers(servers) + "\n")
        figures["servers"] = dataclasses.asdict(servers)
    if plan.fits:
        return figures
    found = nearest_that_fits(settings, arch, topology, trained, plan, note)
    if found is None:
        show(
            "\nNo mesh, micro-batch, remat policy or memory option (docs/memory.md) fits on "
            f"these chips: {_more_chips(plan)}.\n"
        )
        return figures
    nearest, lines = found
    changing = [x for x in lines if x.startswith(("optimizer.name", "lora.rank"))]
    warning = f" ({changing[0]} changes the result of training)" if changing else ""
    show(f"\nThe nearest settings that fit{warning}:\n")
    show("".join(f"  --gin_param={line!r}\n" for line in lines))
    show(f"\n{render(nearest)}")
    return {**figures, "nearest": {"gin_params": lines, **as_json(nearest)}}


def _architecture_of(settings: TrainConfig, name: str | None) -> Architecture:
    """The architecture to plan: `name` if given, else that of the settings."""
    if name is None and settings.model.path is not None:
        path = Path(settings.model.path)
        name = str(path) if path.exists() else path.name
    if name is not None:
        return find_architecture(name)
    assert settings.scratch is not None
    return scratch_architecture(settings.scratch)


def _servers_of(settings: TrainConfig, arch: Architecture, topology: Topology) -> ServerPlan | None:
    """The vLLM servers that the run starts on GPUs of its own machine, if it does."""
    if topology.chip.kind != "gpu" or bound_value("vllm.gpus") is None:
        return None
    return plan_servers(
        arch,
        topology.chip.memory,
        bound_value("vllm.gpu_memory_utilization") or VLLM_MEMORY_UTILIZATION,
        bound_value("vllm.tensor_parallel") or 1,
        jnp.dtype(settings.engine.dtype).itemsize,
        settings.rollout.max_total_tokens,
    )


def _more_chips(plan: Plan) -> str:
    count = enough_chips(plan)
    if count is None:
        return "use chips with more memory"
    return f"by estimates, {count} of them hold the run, with mesh.fsdp = data.rows = {count}"
