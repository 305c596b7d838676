"""`python -m manus_jax.plan --gin_file=F --topology=v5e:8x8`: does a run fit, how fast is it?"""

import json
import sys
from pathlib import Path

import jax

from manus_jax import command
from manus_jax.config.binding import bound_value
from manus_jax.config.commands import TrainConfig, read_train_config
from manus_jax.files import write_atomically
from manus_jax.models.architecture import Architecture
from manus_jax.models.loading import scratch_architecture
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.plans import make_plan
from manus_jax.planning.search import nearest_that_fits
from manus_jax.planning.tables import as_json, render
from manus_jax.planning.topologies import find_topology, missing_compiler
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
    plan = make_plan(settings, arch, topology, args.trained)
    if not topology.compiles:
        print(missing_compiler(topology), file=sys.stderr)
    print(render(plan), end="")
    figures = as_json(plan)
    if not plan.fits:
        report = lambda line: print(line, file=sys.stderr, flush=True)
        found = nearest_that_fits(settings, arch, topology, args.trained, plan, report)
        if found is None:
            print("\nNo remat policy, micro-batch or mesh fits on these chips: take more of them.")
        else:
            print("\nThe nearest settings that fit:")
            nearest, lines = found
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
