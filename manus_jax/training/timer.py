"""Measures the time of each phase of a step, which is also visible in a profile."""

import contextlib
import time
from collections.abc import Iterator

import jax

from manus_jax.status import STATUS


class Timer:
    """Seconds per phase of one step; `other` is the time outside all phases."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        with STATUS.phase(name), jax.profiler.TraceAnnotation(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        step = time.monotonic() - self._began
        other = step - sum(self.seconds.values())
        phases = {**self.seconds, "other": other, "step": step}
        return {f"timing_s/{name}": seconds for name, seconds in phases.items()}
