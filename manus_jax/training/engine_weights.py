"""New weights for the engine of an asynchronous run, in a thread of their own.

The learner hands over a copy of its parameters and continues. There is one copy at most: while the
engine takes it, the next `publish` waits. Work that needs unchanging weights, a validation, runs in
the same thread, which holds back newer versions until it ends; the newest replaces those that wait.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


class EngineWeights:
    """`update(params, version)` gives weights to the engine; it is called in the thread.

    An error there is raised by the next call of `publish`, `wait` or `run_frozen`.
    """

    def __init__(self, update: Callable[[Any, int], None]) -> None:
        self._update = update
        self._thread = ThreadPoolExecutor(1, "weights")
        self._updating = threading.Lock()
        self._waiting: tuple[Any, int] | None = None
        self._taken: Future[None] | None = None
        self._error: BaseException | None = None

    def publish(self, params: Any, version: int) -> None:
        """Copies the parameters, because the next update donates them, and returns."""
        with self._updating:
            self._check()
            self._waiting = None  # before the copy: there are never two of them
        copy = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, params)
        self._waiting = copy, version
        self._taken = self._thread.submit(self._take)

    def wait(self) -> None:
        """Waits until the engine has the newest weights."""
        if self._taken is not None:
            self._taken.result()
        self._check()

    def run_frozen(self, work: Callable[[], T]) -> "Future[T]":
        """Runs `work` with the newest weights, which do not change until it ends."""
        self.wait()
        return self._thread.submit(work)

    def close(self) -> None:
        """Ends the thread after its current work; waiting weights are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _take(self) -> None:
        """Gives the newest weights to the engine, unless an earlier call already has."""
        with self._updating:
            waiting, self._waiting = self._waiting, None
            if waiting is None or self._error is not None:
                return
            try:
                self._update(*waiting)
            except BaseException as error:  # the learner's next call raises it
                self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
