"""Stopping on request: the current step is finished and saved; a second request stops at once.

Requests are SIGINT (Ctrl-C) and SIGTERM (preemption by a scheduler). With a single process both are
recorded here, and the loop checks for them between steps; outside the loop they raise an exception
(`manus_jax.signals`).
With several processes, JAX records a SIGTERM on any host and makes all processes stop after the
same step.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from manus_jax.signals import handled_by, interrupt
from manus_jax.training.job import Job


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

    def record(number: int, frame: FrameType | None) -> None:
        if request.signal_number is None:
            request.signal_number = number
            print(message, flush=True)
        else:
            interrupt(number, frame)

    with handled_by(record):
        yield request
