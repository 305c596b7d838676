"""Computes a value for each step, one step before it is used."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """`next(step)` returns `make(step)`, which a thread has called during the step before.

    Steps are taken in order, from any first one to `total_steps`.
    """

    def __init__(self, make: Callable[[int], T], total_steps: int) -> None:
        self._make, self._total_steps = make, total_steps
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._upcoming: Future[T] | None = None

    def next(self, step: int) -> T:
        upcoming = self._upcoming or self._thread.submit(self._make, step)
        result = upcoming.result()
        self._upcoming = None
        if step < self._total_steps:
            self._upcoming = self._thread.submit(self._make, step + 1)
        return result
