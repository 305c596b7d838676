"""Measures how long an engine has work: the time with at least one request in flight."""

import contextlib
import threading
import time
from collections.abc import Iterator

from manus_jax.timeline import TIMELINE


class UsageClock:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight = 0
        self._since = 0.0
        self._busy = 0.0
        self._span = contextlib.ExitStack()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A request is in flight during the block."""
        with self._lock:
            if self._in_flight == 0:
                self._since = time.monotonic()
                self._span.enter_context(TIMELINE.span("engine", "requests in flight"))
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1
                if self._in_flight == 0:
                    self._busy += time.monotonic() - self._since
                    self._span.close()

    def busy_seconds(self) -> float:
        with self._lock:
            running = time.monotonic() - self._since if self._in_flight else 0.0
            return self._busy + running
