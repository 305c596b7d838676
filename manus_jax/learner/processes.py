"""Host barriers between the processes of a job."""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from orbax.checkpoint import multihost

R = TypeVar("R")
_COMPILE_TIMEOUT_S = 3600.0
_numbers = itertools.count()


def barrier(timeout_s: float, name: str | None = None) -> None:
    """Returns when every process has called it.

    All processes call those without a name in the same order; one with a name is used once.
    Raises JaxRuntimeError, which names the missing processes, after `timeout_s`.
    """
    wait = multihost.get_barrier_sync_fn()
    wait(key=f"manus_jax/{name or next(_numbers)}", timeout_ms=int(timeout_s * 1000))


def compile_on_all(step: Callable[..., R]) -> Callable[..., R]:
    """Wraps a jitted `step` so that no process runs it before all have compiled it.

    Compilation times differ between hosts, and some collectives time out when a process is half a
    minute late. With a single process this is `step` itself.
    """
    if jax.process_count() == 1:
        return step
    compiled: dict[Any, Any] = {}

    def run(*args: Any) -> R:
        shapes = str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), args))
        if shapes not in compiled:
            compiled[shapes] = step.lower(*args).compile()  # type: ignore[attr-defined]
            barrier(_COMPILE_TIMEOUT_S)
        return compiled[shapes](*args)

    return run
