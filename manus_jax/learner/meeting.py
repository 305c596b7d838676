"""Where the processes of a job wait for each other: before a step that they have just compiled.

They compile for as long as each needs. Whoever is done first would wait for the others inside a
collective, and some of those give up after half a minute; here it waits as long as it takes.
"""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

# The coordination service's client has no public name.
from jax._src import distributed

R = TypeVar("R")
_LIMIT_S = 3600
_meetings = itertools.count()


def meet() -> None:
    """Returns when all processes have come; they meet in the same order, so no name is needed."""
    name = f"manus/meeting/{next(_meetings)}"
    client: Any = distributed.global_state.client
    client.wait_at_barrier(name, _LIMIT_S * 1000)


def compiled_by_all(step: Callable[..., R]) -> Callable[..., R]:
    """A jitted `step`; of several processes none runs it before all have compiled it."""
    if jax.process_count() == 1:
        return step
    compiled: list[Any] = []

    def run(*args: Any) -> R:
        if not compiled:
            compiled.append(step.lower(*args).compile())  # type: ignore[attr-defined]
            meet()
        return compiled[0](*args)

    return run
