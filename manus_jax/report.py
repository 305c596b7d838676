"""Writes the HTML report of a run, shows a run live, or compares runs.

python -m manus_jax.report RUN_DIR [--out FILE | --watch]
python -m manus_jax.report --compare RUN_DIR RUN_DIR … [--out FILE] [--markdown FILE [--images DIR]]
"""

import sys
from pathlib import Path

from manus_jax import command
from manus_jax.reporting.compare import write_comparison
from manus_jax.reporting.page import write_report
from manus_jax.reporting.watch import watch

COMPARISON = "comparison.html"


def main(arguments: list[str]) -> None:
    parser = command.Parser(prog="python -m manus_jax.report", description=__doc__)
    parser.add_argument(
        "run_dirs", type=command.path, nargs="+", metavar="RUN_DIR", help="the directory of a run"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--compare",
        action="store_true",
        help="curves of the runs side by side, with mean and range over those that differ only in "
        "train.seed and train.run_dir, and a table of results",
    )
    mode.add_argument(
        "--watch",
        action="store_true",
        help="show what the run is doing until it ends; once, if the output is not a terminal",
    )
    parser.add_argument(
        "--out",
        type=command.output_file,
        help=f"the file to write; RUN_DIR/report.html if absent, {COMPARISON} for a comparison",
    )
    parser.add_argument(
        "--markdown", type=command.output_file, help="also write the comparison's table to a file"
    )
    parser.add_argument(
        "--images",
        type=command.output_directory,
        metavar="DIR",
        help="write learning curves as SVG files, which the file of --markdown shows",
    )
    args = parser.parse_args(arguments)
    if args.watch and args.out:
        parser.error("--watch writes no file; leave out --out")
    if args.markdown and not args.compare:
        parser.error("--markdown needs --compare, whose table it writes")
    if args.images and not args.markdown:
        parser.error("--images needs --markdown, whose file shows them")
    if args.out and _is_other_file(args.out, ".html", ".htm"):
        parser.error(f"--out {args.out} would replace a file that is not HTML")
    if args.compare:
        page = args.out or Path(COMPARISON)
        real = [run.expanduser().resolve() for run in args.run_dirs]
        if twice := next((run for run in real if real.count(run) > 1), None):
            parser.error(f"{twice} is given twice; a comparison would count it twice")
        table = args.markdown
        if table and (
            table.resolve() == page.resolve() or _is_other_file(table, ".md", ".markdown")
        ):
            parser.error(f"--markdown {table} would replace a file that is not Markdown")
        for path in write_comparison(args.run_dirs, page, args.markdown, args.images):
            print(f"wrote {path}")
        return
    if len(args.run_dirs) > 1:
        parser.error("several runs need --compare")
    [run] = args.run_dirs
    if args.watch:
        watch(run)
        return
    print(f"wrote {write_report(run, args.out, _warn)}")


def _is_other_file(path: Path, *suffixes: str) -> bool:
    return path.expanduser().exists() and path.suffix.lower() not in suffixes


def _warn(problem: str) -> None:
    print(f"warning: {' '.join(problem.split())}", file=sys.stderr)


if __name__ == "__main__":
    command.run(main, interrupted="no report was written")
