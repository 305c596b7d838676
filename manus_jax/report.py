"""`python -m manus_jax.report RUN_DIR [--out FILE | --watch]`: one HTML page, or a live view."""

import sys

from manus_jax import command
from manus_jax.reporting.page import write_report
from manus_jax.reporting.watch import watch


def main(arguments: list[str]) -> None:
    parser = command.Parser(prog="python -m manus_jax.report", description=__doc__)
    parser.add_argument("run_dir", type=command.path, help="the directory of a run")
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--out", type=command.output_file, help="the file to write; RUN_DIR/report.html if absent"
    )
    output.add_argument(
        "--watch",
        action="store_true",
        help="show what the run is doing until it ends; once, if the output is not a terminal",
    )
    args = parser.parse_args(arguments)
    if args.watch:
        watch(args.run_dir)
        return
    print(f"wrote {write_report(args.run_dir, args.out, _warn)}")


def _warn(problem: str) -> None:
    print(f"warning: {' '.join(problem.split())}", file=sys.stderr)


if __name__ == "__main__":
    command.run(main, interrupted="no report was written")
