"""Stopping on request: the current step is finished and saved; a second request stops at once.

Requests are SIGINT (Ctrl-C) and SIGTERM (preemption by a scheduler). With a single process both are
recorded here, and the loop checks for them between steps; outside the loop they raise an exception.
With several processes, JAX records a SIGTERM on any host and makes all processes stop after the
same step.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from manus_jax.errors import Terminated
from manus_jax.training.job import Job

_raised: list[int] = []  # the signals that `interruptible` has raised as exceptions


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within the block, SIGTERM raises an exception as SIGINT does, which stops servers."""

    def interrupt(number: int, _: FrameType | None) -> None:
        _raised.append(number)
        raise _exception(number)

    with _handled_by(interrupt):
        try:
            yield
        finally:
            _raised.clear()


class StopRequest:
    """`signal_number` is the first signal received, or None."""

    def __init__(self, job: Job) -> None:
        self.signal_number: int | None = None
        self._job = job

    def after_step(self) -> bool:
        """Whether to stop now; called once before the first step and once after each step."""
        if self.signal_number is None and self._job.count > 1 and self._job.preempted():
            self.signal_number = signal.SIGTERM
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as in shells: 130 or 143."""
        return 128 + (self.signal_number or 0)


@contextlib.contextmanager
def stop_requests(message: str, job: Job) -> Iterator[StopRequest]:
    """Records signals within the block; `message` is printed at the first one.

    Outside the main thread, where Python delivers no signals, nothing is recorded.
    """
    request = StopRequest(job)
    if job.count > 1:
        yield request
        return
    # Python discards an exception that is raised during garbage collection.
    request.signal_number = next(iter(_raised), None)

    def record(number: int, _: FrameType | None) -> None:
        if request.signal_number is not None:
            raise _exception(number)
        request.signal_number = number
        print(message, flush=True)

    with _handled_by(record):
        yield request


def _exception(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Sets the handler of both signals within the block; only the main thread can do this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
