"""Being asked to stop: the step at hand is finished and saved, a second request stops at once.

SIGINT is a person at the keyboard, SIGTERM a scheduler that wants the machine back. Both are only
noted here; the training loop looks between two steps.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):
    """The run stopped where it was asked to, with everything saved. `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class StopRequest:
    """`signal_number` is the first signal that came, None so far."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells say it: 130 or 143."""
        return 128 + (self.signal_number or 0)


@contextlib.contextmanager
def stop_requests(say: str) -> Iterator[StopRequest]:
    """Notes signals within the block; `say` is printed at the first one.

    Outside the main thread, where Python delivers no signals, nothing is noted.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _: FrameType | None) -> None:
        if request:
            raise KeyboardInterrupt
        request.signal_number = number
        print(say, flush=True)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
