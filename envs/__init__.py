"""Environment servers that speak AgentGym's HTTP protocol."""

import sys
from types import TracebackType


def _report_interrupt(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted before anything was started", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # a command, whose imports take a while: Ctrl-C is one line there, too
    sys.excepthook = _report_interrupt
