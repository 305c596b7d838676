"""Selects the server for a request: a state machine without I/O, locks or clock.

A session stays on one server, whose cache holds its earlier turns, unless that server is out of
service or much more loaded than another. A server is in service only while it holds the pool's
current weights; one that fails is marked down (`servers.health`) and returns by loading them.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import replace

from manus_jax.servers.health import HEALTHY, BackOff, Health

_NEW = Health(problem="not reached yet")


@dataclasses.dataclass(frozen=True)
class VllmServerState:
    """What the pool knows about one server; `ready` means in service."""

    url: str
    ready: bool = False
    capacity: int = 1
    in_flight: int = 0
    health: Health = _NEW


def choose(
    states: Iterable[VllmServerState], home: str | None, imbalance: int
) -> VllmServerState | None:
    """The server for a session that was on `home`; None while none has room.

    The session moves if its server has over `imbalance` more requests than the least loaded one.
    """
    open_now = [s for s in states if s.ready and s.in_flight < s.capacity]
    if not open_now:
        return None
    least = min(open_now, key=lambda s: s.in_flight)
    own = next((s for s in open_now if s.url == home), None)
    if own is not None and own.in_flight <= least.in_flight + imbalance:
        return own
    return least


def sent(state: VllmServerState) -> VllmServerState:
    return replace(state, in_flight=state.in_flight + 1)


def answered(state: VllmServerState) -> VllmServerState:
    return replace(state, in_flight=state.in_flight - 1)


def came_up(state: VllmServerState, capacity: int) -> VllmServerState:
    """The server answers and holds the current weights."""
    return replace(state, ready=True, capacity=capacity, health=HEALTHY)


def went_down(
    state: VllmServerState, problem: str, now: float, back_off: BackOff
) -> VllmServerState:
    """The server failed; its requests in flight are sent to other servers."""
    health = state.health.mark_down(problem, now, back_off)
    return replace(state, ready=False, in_flight=0, health=health)


def due(state: VllmServerState, now: float) -> bool:
    """Whether the server is out of service and may be tried again."""
    return not state.ready and state.health.may_retry(now)
