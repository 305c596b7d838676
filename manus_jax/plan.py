"""`python -m manus_jax.plan --gin_file=F --topology=v5e:8x8`: does a run fit, how fast is it?"""

import functools
import json
import sys

import jax

from manus_jax import command
from manus_jax.config.commands import read_train_config
from manus_jax.files import write_atomically
from manus_jax.planning.report import report_plan


def main(arguments: list[str]) -> None:
    parser = command.config_parser("plan", "Compiles the updates of a run for absent hardware.")
    parser.add_argument(
        "--topology", required=True, help="the hardware: v5e:8x8, v5p:2x2x4, cuda:8x80GB, ..."
    )
    parser.add_argument(
        "--slices",
        type=command.number(int, at_least=1, at_most=4096),
        default=1,
        help="the number of TPU slices (default: 1)",
    )
    parser.add_argument(
        "--architecture",
        type=command.text,
        help="a public model such as qwen2.5-7b, or a config.json (default: that of model.path)",
    )
    share = command.number(float, above=0, at_most=1)
    parser.add_argument(
        "--trained", type=share, default=0.3, help="the share of agent tokens (default: 0.3)"
    )
    parser.add_argument(
        "--json", type=command.output_file, metavar="OUT", help="also write the figures to OUT"
    )
    args = parser.parse_args(arguments)
    if args.json and args.json.exists() and args.json.suffix != ".json":
        parser.error(f"--json {args.json} would replace a file that is not JSON")
    jax.config.update("jax_platforms", "cpu")
    settings = read_train_config(args.gin_file, args.gin_param)
    figures = report_plan(
        settings,
        args.topology,
        args.slices,
        args.architecture,
        args.trained,
        show=functools.partial(print, end="", flush=True),
        note=functools.partial(print, file=sys.stderr, flush=True),
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.json, json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    # JAX writes programs for absent devices to its compilation cache but cannot load them again.
    jax.config.update("jax_enable_compilation_cache", False)
    command.run(main, interrupted="nothing was written")
