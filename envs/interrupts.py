"""Ctrl-C and SIGTERM while a command's modules are imported, which takes seconds, are one line.

No exception is raised: Python would discard it within a garbage collection, and go on.
"""

import os
import signal
import sys
from types import FrameType


def report_early_interrupts() -> None:
    """Sets handlers of both signals if a command is being imported by `python -m`."""
    if sys.argv[:1] != ["-m"]:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    what = b"interrupted" if number == signal.SIGINT else b"terminated"
    os.write(2, what + b" before anything was started\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
