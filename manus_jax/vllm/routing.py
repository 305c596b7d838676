"""Which server gets a request: a state machine without I/O, locks or clock.

A session stays with one server, whose cache holds its earlier turns, unless that server is out of
service or much more loaded than another. A server serves only while it holds the pool's current
weights: one that fails is put aside, and comes back by being brought to them.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import replace


@dataclasses.dataclass(frozen=True)
class ServerState:
    """What the pool knows of a server. `problem` says why it is out of service."""

    url: str
    ready: bool = False
    problem: str = "not reached yet"
    capacity: int = 1
    in_flight: int = 0
    failures_in_a_row: int = 0
    retry_at: float = 0.0


@dataclasses.dataclass(frozen=True)
class RoutingPolicy:
    """`imbalance`: requests that a session's own server may have more than the least loaded one.
    A server that fails is tried again after `first_wait` seconds, twice as long each time."""

    imbalance: int = 8
    first_wait: float = 1.0
    longest_wait: float = 60.0


def choose(
    states: Iterable[ServerState], home: str | None, policy: RoutingPolicy
) -> ServerState | None:
    """The server for a session that was on `home`; None while there is none with room."""
    open_now = [s for s in states if s.ready and s.in_flight < s.capacity]
    if not open_now:
        return None
    least = min(open_now, key=lambda s: s.in_flight)
    own = next((s for s in open_now if s.url == home), None)
    if own is not None and own.in_flight <= least.in_flight + policy.imbalance:
        return own
    return least


def sent(state: ServerState) -> ServerState:
    return replace(state, in_flight=state.in_flight + 1)


def answered(state: ServerState) -> ServerState:
    return replace(state, in_flight=state.in_flight - 1)


def came_up(state: ServerState, capacity: int) -> ServerState:
    """It answers and holds the current weights."""
    return replace(
        state, ready=True, problem="", capacity=capacity, failures_in_a_row=0, retry_at=0.0
    )


def went_down(state: ServerState, problem: str, now: float, policy: RoutingPolicy) -> ServerState:
    """It failed; what was in flight on it is served elsewhere."""
    failures = state.failures_in_a_row + 1
    wait = min(policy.first_wait * 2 ** min(failures - 1, 30), policy.longest_wait)
    return replace(
        state,
        ready=False,
        problem=problem,
        in_flight=0,
        failures_in_a_row=failures,
        retry_at=now + wait,
    )


def due(state: ServerState, now: float) -> bool:
    """It is out of service, and time to try it again."""
    return not state.ready and now >= state.retry_at
