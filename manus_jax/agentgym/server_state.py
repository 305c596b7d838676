"""Selects the server for the next session, and when a failed server is tried again.

A state machine without I/O, locks or clock: states are frozen, and transitions are functions of
(state, event, time, a random number). A server that loses contact, or repeatedly creates no
session, is marked down with a back-off (`servers.health`); after that a single trial session
decides whether it is back.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from manus_jax.agentgym.failures import FailureKind
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.servers.health import HEALTHY, BackOff, Health, HealthPolicy


def health_policy(settings: EnvPoolSettings) -> HealthPolicy:
    """When a server is marked down, and how long until it is tried again."""
    back_off = BackOff(first=settings.first_retry, limit=settings.longest_retry)
    return HealthPolicy(back_off, settings.bad_answers, settings.broken_after)


@dataclass(frozen=True)
class EnvServerState:
    """What the pool knows about one environment server."""

    url: str
    limit: int | None = None  # sessions it can hold at once
    leases: int = 0  # sessions in use, including those being created
    idle: int = 0  # sessions kept for reuse
    full: bool = False  # it has no room for another session until one is released
    strikes: int = 0  # sessions that could not be created since the last successful step
    refusals: int = 0  # resets and steps that failed since the last successful step
    silences: int = 0  # consecutive incidents without a response
    trial_out: bool = False
    health: Health = HEALTHY

    @property
    def suspect(self) -> bool:
        return self.health.down


def granted(state: EnvServerState) -> EnvServerState:
    """A session of this server was leased; on a suspect server it is the trial."""
    return replace(state, leases=state.leases + 1, trial_out=state.suspect or state.trial_out)


def released(state: EnvServerState, trial: bool) -> EnvServerState:
    """A session was released, or could not be created: there is room for another."""
    trial_out = state.trial_out and not trial
    # A restarted server starts at 0 leases, while leases from before the restart still end.
    return replace(state, leases=max(0, state.leases - 1), full=False, trial_out=trial_out)


def refused_session(state: EnvServerState, trial: bool) -> EnvServerState:
    """The server refused a session or reused an id: it is full if other sessions are leased.

    Releasing any of those makes room, so a server does not stay full.
    """
    state = released(state, trial)
    return replace(state, full=state.leases > 0)


def keeping(state: EnvServerState, idle: int) -> EnvServerState:
    """`idle` sessions of this server are kept for reuse."""
    return replace(state, idle=idle)


def made_room(state: EnvServerState) -> EnvServerState:
    """Idle sessions of this server were dropped."""
    return replace(state, full=False)


def succeeded(state: EnvServerState) -> EnvServerState:
    """A step succeeded, so the server is healthy."""
    return replace(state, strikes=0, refusals=0, silences=0, trial_out=False, health=HEALTHY)


def refused(state: EnvServerState) -> EnvServerState:
    """A reset or step failed although the server answers.

    The reason may be the item or the action, so the server stays in use; servers without refusals
    are preferred, because an episode has few attempts.
    """
    return replace(state, refusals=state.refusals + 1)


def failed(
    state: EnvServerState, kind: FailureKind, now: float, chance: float, policy: HealthPolicy
) -> EnvServerState:
    """The server is lost, or did not create a session.

    Many sessions see the same incident, so it counts once until retry_at.
    """
    if kind is FailureKind.ITEM or not state.health.may_retry(now):
        return state
    strikes = state.strikes + 1
    silences = state.silences + 1 if kind.lost_contact else 0
    if not (kind.lost_contact or state.suspect or strikes >= policy.bad_answers):
        return replace(state, strikes=strikes, silences=silences)
    return replace(
        state,
        strikes=0,
        silences=silences,
        trial_out=False,
        full=False,
        health=state.health.mark_down(kind, now, policy.back_off, chance),
    )


def broken(state: EnvServerState, policy: HealthPolicy) -> bool:
    """Whether the server failed to respond so often that it should be replaced.

    A server that responds, even with errors, may still serve other sessions.
    """
    return state.silences >= policy.broken_after


def refuses(state: EnvServerState, policy: HealthPolicy) -> bool:
    """Whether the server answers, but created no session through many trials, and has none."""
    tried = state.health.incidents >= 2 * policy.broken_after
    return tried and not state.silences and not state.leases


def available(state: EnvServerState, now: float) -> bool:
    """Whether a session may be requested from this server now."""
    if state.full and not state.idle:
        return False
    if state.limit is not None and state.leases >= state.limit:
        return False
    return not state.suspect or (state.health.may_retry(now) and not state.trial_out)


def choose(states: Iterable[EnvServerState], now: float) -> EnvServerState | None:
    """The least-loaded available server, healthy before suspect; None if there is none."""
    candidates = [state for state in states if available(state, now)]
    load = lambda state: (state.leases + state.refusals, state.health.incidents)
    return min(candidates, key=load, default=None)


def next_trial(states: Iterable[EnvServerState], now: float) -> float | None:
    """Seconds until a server that is down may be tried; None if there is no such server."""
    waits = [
        state.health.retry_at - now
        for state in states
        if state.suspect and not state.trial_out and not state.full
    ]
    return min((wait for wait in waits if wait > 0), default=None)
