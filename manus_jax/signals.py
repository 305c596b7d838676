"""SIGINT (Ctrl-C) and SIGTERM as exceptions, which stop servers and remove temporary files.

Python discards exceptions that are raised in garbage collection, finalizers and closing files. The
signal is then sent again: an exception that is gone before its block has ended was discarded.
"""

import contextlib
import functools
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

from manus_jax.errors import Interrupted, Terminated

_AGAIN_S = 0.02


Hook = Callable[["sys.UnraisableHookArgs"], object]


class _Block:
    """The exceptions that signals have raised within an `interruptible` block."""

    def __init__(self) -> None:
        self._raised: set[weakref.ref[Interrupted]] = set()
        self._timers: list[threading.Timer] = []

    def watch(self, exception: Interrupted, number: int) -> None:
        gone = functools.partial(self._discarded, number)
        self._raised.add(weakref.ref(exception, gone))

    def close(self) -> None:
        self._raised.clear()  # a reference that is gone itself calls nothing
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _discarded(self, number: int, reference: "weakref.ref[Interrupted]") -> None:
        self._raised.discard(reference)
        self.send_again(number)

    def send_again(self, number: int) -> None:
        # To the main thread, because a sleep there is not interrupted by a signal to another one.
        arguments = (threading.main_thread().ident, number)
        timer = threading.Timer(_AGAIN_S, signal.pthread_kill, arguments)
        self._timers.append(timer)
        timer.start()


_blocks: list[_Block] = []  # those that are open, the innermost last


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within the block, SIGTERM raises an exception as SIGINT does, and neither is lost."""
    hook = sys.unraisablehook
    block = _Block()
    # Before the handlers: a signal may arrive as soon as they are set.
    sys.unraisablehook = functools.partial(_report_discarded, hook)
    _blocks.append(block)
    try:
        with handled_by(interrupt):
            try:
                yield
            finally:
                block.close()
    finally:
        _blocks.remove(block)
        sys.unraisablehook = hook


def interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of a signal that raises its exception."""
    exception = Terminated() if number == signal.SIGTERM else Interrupted()
    if _blocks:
        while frame is not None:
            if frame.f_code is _report_discarded.__code__:  # which is to complete its report
                _blocks[-1].send_again(number)
                return
            frame = frame.f_back
        _blocks[-1].watch(exception, number)
    try:
        raise exception
    finally:
        del exception  # which the traceback would otherwise keep alive with this frame


def _report_discarded(hook: Hook, unraisable: "sys.UnraisableHookArgs") -> None:
    """Python's report of a discarded exception, without those that are sent again."""
    if not isinstance(unraisable.exc_value, Interrupted):
        hook(unraisable)


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
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
