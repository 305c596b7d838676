"""`python -m manus_jax.plan --gin_file=F --topology=v5e:8x8`: does a run fit, how fast is it?"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from manus_jax import command
from manus_jax.config.binding import bound_value
from manus_jax.config.commands import TrainConfig, read_train_config
from manus_jax.files import write_atomically
from manus_jax.models.architecture import Architecture
from manus_jax.models.loading import scratch_architecture
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.plans import Plan, make_plan
from manus_jax.planning.search import enough_chips, nearest_that_fits
from manus_jax.planning.servers import VLLM_MEMORY_UTILIZATION, ServerPlan, plan_servers
from manus_jax.planning.tables import as_json, describe_servers, render
from manus_jax.planning.topologies import Topology, find_topology, missing_compiler
from manus_jax.training.learner_specs import check_lengths


def architecture_of(settings: TrainConfig, name: str | None) -> Architecture:
    """The architecture to plan: `name` if given, else that of the settings."""
    if name is None and settings.model.path is not None:
        path = Path(settings.model.path)
        name = str(path) if path.exists() else path.name
    if name is not None:
        return find_architecture(name)
    assert settings.scratch is not None
    return scratch_architecture(settings.scratch)


def servers_of(settings: TrainConfig, arch: Architecture, topology: Topology) -> ServerPlan | None:
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
        return "take chips with more memory"
    return f"by estimates, {count} of them hold the run, with mesh.fsdp = data.rows = {count}"


def main(arguments: list[str]) -> None:
    parser = command.config_parser("plan", "Compiles the updates of a run for absent hardware.")
    parser.add_argument("--topology", required=True, help="v5e:8x8, v5p:2x2x4, cuda:8x80GB, ...")
    parser.add_argument(
        "--slices",
        type=command.number(int, at_least=1, at_most=4096),
        default=1,
        help="number of TPU slices (1)",
    )
    parser.add_argument(
        "--architecture", type=command.text, help="qwen2.5-7b, ..., or a config.json (model.path)"
    )
    share = command.number(float, above=0, at_most=1)
    parser.add_argument("--trained", type=share, default=0.3, help="share of agent tokens (0.3)")
    parser.add_argument(
        "--json", type=command.output_file, metavar="OUT", help="also write the figures to OUT"
    )
    args = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    settings = read_train_config(args.gin_file, args.gin_param)
    check_lengths(settings)
    arch = architecture_of(settings, args.architecture)
    gpu_memory = bound_value("vllm.learner_memory_fraction")
    topology = find_topology(args.topology, args.slices, gpu_memory)
    servers = servers_of(settings, arch, topology)
    plan = make_plan(settings, arch, topology, args.trained)
    if not topology.compiles:
        print(missing_compiler(topology), file=sys.stderr)
    print(render(plan), end="")
    figures = as_json(plan)
    if servers is not None:
        print(describe_servers(servers))
        figures["servers"] = dataclasses.asdict(servers)
    if not plan.fits:
        report = lambda line: print(line, file=sys.stderr, flush=True)
        found = nearest_that_fits(settings, arch, topology, args.trained, plan, report)
        if found is None:
            print(
                "\nNo mesh, micro-batch, remat policy or memory option (docs/memory.md) fits on "
                f"these chips: {_more_chips(plan)}."
            )
        else:
            nearest, lines = found
            changing = [x for x in lines if x.startswith(("optimizer.name", "lora.rank"))]
            note = f" ({changing[0]} changes the result of training)" if changing else ""
            print(f"\nThe nearest settings that fit{note}:")
            print("\n".join(f"  --gin_param={line!r}" for line in lines))
            print()
            print(render(nearest), end="")
            figures["nearest"] = {"gin_params": lines, **as_json(nearest)}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.json, json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    # JAX writes programs for absent devices to its compilation cache but cannot load them again.
    jax.config.update("jax_enable_compilation_cache", False)
    command.run(main, interrupted="nothing was written")
