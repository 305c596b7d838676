"""Ctrl-C while a command's modules are imported, which takes seconds, is one line."""

import sys
from types import TracebackType


def report_early_interrupts() -> None:
    """Sets Python's hook for uncaught exceptions if a command is being imported by `python -m`."""
    if sys.argv[:1] == ["-m"]:
        sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted before anything was started", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
