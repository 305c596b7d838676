"""`python -m manus_jax.report RUN_DIR [--out FILE]`: writes one HTML page about a run."""

from manus_jax import command
from manus_jax.reporting.page import write_report


def main(arguments: list[str]) -> None:
    parser = command.Parser(prog="python -m manus_jax.report", description=__doc__)
    parser.add_argument("run_dir", type=command.path, help="the directory of a run of train or sft")
    parser.add_argument(
        "--out", type=command.output_file, help="the file to write; RUN_DIR/report.html if absent"
    )
    args = parser.parse_args(arguments)
    print(f"wrote {write_report(args.run_dir, args.out)}")


if __name__ == "__main__":
    command.run(main, interrupted="no report was written")
