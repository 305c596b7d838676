"""New weights for the engine of an asynchronous run, in a thread of their own.

The learner hands over a copy of its parameters and continues. There is one copy at most: while the
engine takes it, the next `publish` waits. Work that needs unchanging weights, a validation, runs in
the same thread, which holds back newer versions until it ends; the newest replaces those that wait.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


class EngineWeights:
    """`update(params, version)` gives weights to the engine; it is called in the thread.

    An error there is raised by the next call of any method.
    """

    def __init__(self, update: Callable[[Any, int], None]) -> None:
        self._update = update
        # Guards everything below; changes are notified.
        self._changed = threading.Condition()
        self._waiting: tuple[Any, int] | None = None
        self._work: Callable[[], None] | None = None
        self._updating = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def publish(self, params: Any, version: int) -> None:
        """Copies the parameters, because the next update donates them, and returns."""
        with self._changed:
            self._wait_for(lambda: not self._updating)
            self._waiting = None  # before the copy: there are never two of them
        copy = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, params)
        with self._changed:
            self._waiting = copy, version
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until the engine has the newest weights."""
        with self._changed:
            self._wait_for(lambda: self._waiting is None and not self._updating)

    def run_frozen(self, work: Callable[[], T]) -> "Future[T]":
        """Runs `work` with the newest weights, which do not change until it ends."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # raised where the result is read
                result.set_exception(error)

        with self._changed:
            self._wait_for(
                lambda: self._waiting is None and not self._updating and self._work is None
            )
            self._work = run
            self._changed.notify_all()
        return result

    def close(self) -> None:
        """Ends the thread after its current work; waiting weights are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or condition())
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._work or self._waiting)
                if self._closed:
                    return
                work, waiting = self._work, None
                if work is None:
                    waiting, self._waiting = self._waiting, None
                    self._updating = True
            try:
                if work is not None:
                    work()
                elif waiting is not None:
                    self._update(*waiting)
            except BaseException as error:  # the learner's next call raises it
                with self._changed:
                    self._error = error
            waiting = None  # frees the copy
            with self._changed:
                if work is not None:
                    self._work = None
                self._updating = False
                self._changed.notify_all()
