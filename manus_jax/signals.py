"""SIGINT (Ctrl-C) and SIGTERM as exceptions, which stop servers and remove temporary files."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from manus_jax.errors import Terminated

_AGAIN_S = 0.02


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within the block, SIGTERM raises an exception as SIGINT does.

    Python discards exceptions in garbage collection and finalizers, where JAX runs code of its own;
    the signal is then sent again.
    """

    def interrupt(number: int, _: FrameType | None) -> None:
        raise as_exception(number)

    def discarded(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            hook(unraisable)
            return
        number = signal.SIGTERM if isinstance(unraisable.exc_value, Terminated) else signal.SIGINT
        # To the main thread, because a sleep there is not interrupted by a signal to another one.
        arguments = (threading.main_thread().ident, number)
        threading.Timer(_AGAIN_S, signal.pthread_kill, arguments).start()

    # The hook first: a signal may arrive as soon as its handler is set.
    hook, sys.unraisablehook = sys.unraisablehook, discarded
    try:
        with handled_by(interrupt):
            yield
    finally:
        sys.unraisablehook = hook


def as_exception(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


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
