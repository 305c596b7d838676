"""Being asked to stop: the step at hand is finished and saved, a second request stops at once.

SIGINT is a person at the keyboard, SIGTERM a scheduler that wants the machine back. Both are only
noted here; the training loop looks between two steps. Where several processes train together, JAX
notes SIGTERM in their place, because one that only a single host gets concerns them all.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Preempted = Callable[[int], bool]
"""Whether, at this step, the processes are to stop because one of their hosts is wanted back."""


class StopRequest:
    """`signal_number` is the first signal that came, None so far."""

    def __init__(self, preempted: Preempted | None = None) -> None:
        self.signal_number: int | None = None
        self._preempted = preempted

    def after(self, step: int) -> bool:
        """Whether to stop after this step; to be asked once a step, and before the first."""
        if self.signal_number is None and self._preempted is not None and self._preempted(step):
            self.signal_number = signal.SIGTERM
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells say it: 130 or 143."""
        return 128 + (self.signal_number or 0)


@contextlib.contextmanager
def stop_requests(say: str, preempted: Preempted | None = None) -> Iterator[StopRequest]:
    """Notes signals within the block; `say` is printed at the first one.

    With `preempted` it is that which knows of SIGTERM. Outside the main thread, where Python
    delivers no signals, nothing is noted.
    """
    request = StopRequest(preempted)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _: FrameType | None) -> None:
        if request.signal_number is not None:
            raise KeyboardInterrupt
        request.signal_number = number
        print(say, flush=True)

    noted = (signal.SIGINT,) if preempted else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in noted}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
