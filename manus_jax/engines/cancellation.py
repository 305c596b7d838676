"""Prompt cancellation of many episodes at once, and a time limit for each of them.

Waits are ended by `cancel`; nothing polls. A thread that is inside a call to an environment server
notices the cancellation when the call returns.
"""

import threading
import time
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from manus_jax.engines.protocol import EngineError
from manus_jax.run_slots import SLOTS, Wait

T = TypeVar("T")


class Cancelled(Exception):
    """The episode was cancelled."""


class Overdue(Exception):
    """The episode has taken longer than its time limit."""


class Cancellation:
    """Shared by the episodes of a run; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._waiting: dict[Wait, Future[Any]] = {}

    def cancel(self) -> None:
        with self._lock:
            self._event.set()
            waiting = dict(self._waiting)
        for wait, future in waiting.items():
            future.cancel()
            wait.end()

    def check(self) -> None:
        """Raises Cancelled if `cancel` was called."""
        if self._event.is_set():
            raise Cancelled

    def sleep(self, seconds: float) -> None:
        SLOTS.leave()
        if self._event.wait(seconds):
            raise Cancelled

    def result(self, future: "Future[T]", timeout: float) -> T:
        """Waits for a generation; EngineError on a timeout or if the engine cancelled it."""
        wait = Wait(SLOTS)
        with self._lock:
            self._waiting[wait] = future
        try:
            future.add_done_callback(lambda _: wait.end())
            if self._event.is_set():
                future.cancel()
                raise Cancelled
            in_time = wait.block(timeout)
        finally:
            with self._lock:
                del self._waiting[wait]
        self.check()
        if not in_time:
            future.cancel()
            raise EngineError(f"the engine did not respond within {timeout:g} s")
        try:
            return future.result()
        except CancelledError:
            raise EngineError("the engine cancelled the request") from None


class EpisodeCancellation:
    """The run's cancellation for one episode, which also ends `limit_s` seconds after `begin`."""

    def __init__(self, run: Cancellation, limit_s: float | None = None) -> None:
        self._run = run
        self._limit_s = limit_s
        self._deadline: float | None = None

    def begin(self) -> float:
        """Starts the time limit, the first time; returns its end by the monotonic clock.

        An episode calls it when it has an environment: those that wait for one are not late.
        """
        if self._deadline is None:
            self._deadline = time.monotonic() + (self._limit_s or threading.TIMEOUT_MAX)
        return self._deadline

    def check(self) -> None:
        """Raises Cancelled or Overdue."""
        self._run.check()
        if self._left() <= 0:
            raise Overdue(f"not finished after {self._limit_s:g} s (rollout.episode_timeout)")

    def sleep(self, seconds: float) -> None:
        self._run.sleep(min(seconds, max(0.0, self._left())))
        self.check()

    def result(self, future: "Future[T]", timeout: float) -> T:
        """Like `Cancellation.result`; the request is cancelled when the episode is overdue."""
        try:
            return self._run.result(future, min(timeout, max(0.0, self._left())))
        except EngineError:
            self.check()
            raise

    def _left(self) -> float:
        return (
            threading.TIMEOUT_MAX if self._deadline is None else self._deadline - time.monotonic()
        )
