"""How commands read their flags and how they end.

User errors exit with code 2 and one line on stderr; anything else is a bug and shows its traceback.
"""

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from manus_jax.accelerators import prepare_accelerators
from manus_jax.errors import RESUMES, UserError, is_expected, report_error
from manus_jax.limits import Range, path_problem, shown, text_problem, url_problem
from manus_jax.signals import interruptible


class UsageError(UserError):
    """Flags or arguments that a command does not take."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are user errors, and which takes no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=layout, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses repeated flags and unknown ones, with the flag that they may stand for."""
        flags = list(self._option_string_actions)
        given = args[: args.index("--")] if "--" in args else args
        seen = set()
        for flag, _, value in (word.partition("=") for word in given if word.startswith("--")):
            action = self._option_string_actions.get(flag)
            if flag in seen and not isinstance(action, argparse._AppendAction):
                self.error(f"{flag} is given twice")
            if value == "--":  # argparse would remove it
                self.error(f"argument {flag}: expected one argument, not '--'")
            seen.add(flag)
            if flag not in flags and self._subparsers is None:
                close = difflib.get_close_matches(flag, flags, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                self.error(f"unknown flag {shown(flag)}{hint}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the arguments)")


def config_parser(command: str, description: str) -> Parser:
    """A parser with the flags of every command that reads a gin configuration."""
    parser = Parser(prog=f"python -m manus_jax.{command}", description=description)
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file of bindings; may be given several times, later files override earlier ones",
    )
    parser.add_argument(
        "--gin_param",
        action="append",
        default=[],
        metavar="'a.b = c'",
        help="a binding that overrides the files; may be given several times",
    )
    return parser


def config_comment(parser: Parser, args: argparse.Namespace) -> str:
    """The command as a line of comment, for the `config.gin` of a run."""
    files = [f"--gin_file={path}" for path in args.gin_file]
    params = [f"--gin_param={' '.join(param.split())}" for param in args.gin_param]
    return f"# {parser.prog} {shlex.join([*files, *params])}\n"


def number(kind: type[float], **limits: float) -> Callable[[str], float]:
    """The type of a flag that is an int or a float within the limits of `Range`."""
    allowed = Range(**limits)

    def parse(text: str) -> float:
        try:
            if not text.isascii() or "_" in text or text != text.strip():  # Python reads these
                raise ValueError
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {what}") from None
        if problem := allowed.problem(value):
            raise argparse.ArgumentTypeError(f"{shown(value)} {problem}")
        return value

    return parse


def text(value: str) -> str:
    """The type of a flag that is a name."""
    if problem := text_problem(value) or (None if value.strip() else "is empty"):
        raise argparse.ArgumentTypeError(f"{shown(value)} {problem}")
    return value


def path(text: str) -> Path:
    """The type of a flag that is a path."""
    if problem := path_problem(text):
        raise argparse.ArgumentTypeError(f"{shown(text)} {problem}")
    return Path(text).expanduser()  # shells do not expand --flag=~/path


def _writable(text: str) -> Path:
    """A path that exists and can be written, or that can be made."""
    target = path(text)
    if target.name in ("", ".."):
        target = Path(os.path.abspath(target))
    if not target.name:
        raise argparse.ArgumentTypeError(f"{text} is the root directory")
    if target.is_symlink() and not target.exists():
        raise argparse.ArgumentTypeError(f"{text} is a link to nothing")
    there = next(p for p in (target, *target.absolute().parents) if p.exists())
    if there != target and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {there} is not a directory")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: {there} cannot be written")
    return target


def output_file(text: str) -> Path:
    """The type of a flag that is a file to write."""
    target = _writable(text)
    if target.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory, not a file")
    if target.exists() and not target.is_file():  # it would be replaced
        raise argparse.ArgumentTypeError(f"{text} is a device or a pipe, not a file")
    return target


def output_directory(text: str) -> Path:
    """The type of a flag that is a directory to write to."""
    target = _writable(text)
    if target.exists() and not target.is_dir():
        raise argparse.ArgumentTypeError(f"{text} exists and is not a directory")
    return target


def url(text: str) -> str:
    """The type of a flag that is the address of a server."""
    if problem := url_problem(text):
        raise argparse.ArgumentTypeError(f"{shown(text)} {problem}")
    return text


def run(main: Callable[[list[str]], None], interrupted: str = RESUMES) -> None:
    """Runs a command on the program's arguments.

    `interrupted` is the message after SIGINT (Ctrl-C) and SIGTERM.
    """
    prepare_accelerators()
    try:
        with interruptible():
            main(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        if not is_expected(error):
            raise
        sys.exit(report_error(error, interrupted))
