"""`python -m manus_jax.convert from-hf|to-hf`: converts between Hugging Face and Orbax."""

from manus_jax import command
from manus_jax.models.conversion import from_hf, to_hf
from manus_jax.training.run_directory import disk_errors


def main(arguments: list[str]) -> None:
    parser = command.Parser(prog="python -m manus_jax.convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    read = commands.add_parser("from-hf", help="converts a Hugging Face directory to a checkpoint")
    read.add_argument("--hf", type=command.path, required=True, help="the Hugging Face directory")
    read.add_argument(
        "--out", type=command.output_directory, required=True, help="the run directory to make"
    )
    write = commands.add_parser("to-hf", help="converts a checkpoint to a Hugging Face directory")
    write.add_argument(
        "--checkpoint", type=command.path, required=True, help="a run directory or a step below it"
    )
    write.add_argument(
        "--out", type=command.output_directory, required=True, help="the directory to make"
    )
    args = parser.parse_args(arguments)
    with disk_errors(args.out, "Free some space and run the command again"):
        if args.command == "from-hf":
            print(f"wrote {from_hf(args.hf, args.out)}")
        else:
            to_hf(args.checkpoint, args.out)
            print(f"wrote {args.out}")


if __name__ == "__main__":
    command.run(main, interrupted="the output is not complete; run the command again")
