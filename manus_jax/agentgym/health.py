"""Which server gets the next session, and when a failed one is tried again.

A state machine without I/O, locks or clock: states are frozen, transitions are functions of
(state, event, time, a random number), and `choose` ranks the states. A server that loses contact,
or answers badly several times running, is put aside for a time that doubles with each incident;
after that a single trial session decides whether it is back.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from manus_jax.agentgym.failures import FailureKind


@dataclass(frozen=True)
class BackOff:
    """Waiting times that grow with every failure in a row, spread out by chance."""

    first: float = 0.5
    factor: float = 2.0
    limit: float = 60.0
    jitter: float = 0.5

    def seconds(self, failures: int, chance: float) -> float:
        """The wait after the n-th failure in a row; `chance` in 0..1 takes off up to `jitter`."""
        # The exponent is capped: beyond 64 doublings every wait is at the limit anyway.
        whole = min(self.first * self.factor ** min(failures - 1, 64), self.limit)
        return whole * (1.0 - self.jitter * chance)


@dataclass(frozen=True)
class HealthPolicy:
    """How much is forgiven: bad answers until it is put aside, silences until it is broken."""

    back_off: BackOff = field(default_factory=BackOff)
    bad_answers: int = 3
    broken_after: int = 4


@dataclass(frozen=True)
class ServerState:
    """What the pool knows of one server."""

    url: str
    limit: int | None = None  # sessions it can hold at once
    leases: int = 0  # sessions in use, those being created included
    idle: int = 0  # sessions kept for reuse
    full: bool = False  # it has no room for another session until one comes back
    strikes: int = 0  # bad answers since the last good step
    incidents: int = 0  # times put aside since the last good step
    silences: int = 0  # the latest of them in a row in which it gave no answer at all
    retry_at: float = 0.0
    trial_out: bool = False

    @property
    def suspect(self) -> bool:
        return self.incidents > 0


def granted(state: ServerState) -> ServerState:
    """A session of this server was given away; on a suspect server it is the trial."""
    return replace(state, leases=state.leases + 1, trial_out=state.suspect or state.trial_out)


def released(state: ServerState, trial: bool) -> ServerState:
    """A session came back, or did not come about: there is room for another."""
    trial_out = state.trial_out and not trial
    # A server that came back at its old address begins at 0 while leases of its past run out.
    return replace(state, leases=max(0, state.leases - 1), full=False, trial_out=trial_out)


def turned_away(state: ServerState, trial: bool) -> ServerState:
    """The server refused a session or handed out an id in use: full, if others are out.

    Each of those makes room when it comes back, so a full server never stays full.
    """
    state = released(state, trial)
    return replace(state, full=state.leases > 0)


def keeping(state: ServerState, idle: int) -> ServerState:
    """So many sessions of this server now wait to be used again."""
    return replace(state, idle=idle)


def forgetting(state: ServerState) -> ServerState:
    """The idle sessions of this server were given up, which may have made room."""
    return replace(state, full=False)


def succeeded(state: ServerState) -> ServerState:
    """A step went well, so the server is healthy."""
    return replace(state, strikes=0, incidents=0, silences=0, retry_at=0.0, trial_out=False)


def failed(
    state: ServerState, kind: FailureKind, now: float, chance: float, policy: HealthPolicy
) -> ServerState:
    """A call failed. Many sessions see the same incident, so it counts once until retry_at."""
    if kind is FailureKind.ITEM or now < state.retry_at:
        return state
    strikes = state.strikes + 1
    silences = state.silences + 1 if kind.lost_contact else 0
    if not (kind.lost_contact or state.suspect or strikes >= policy.bad_answers):
        return replace(state, strikes=strikes, silences=silences)
    incidents = state.incidents + 1
    return replace(
        state,
        strikes=0,
        incidents=incidents,
        silences=silences,
        retry_at=now + policy.back_off.seconds(incidents, chance),
        trial_out=False,
        full=False,
    )


def broken(state: ServerState, policy: HealthPolicy) -> bool:
    """The server was silent so often that it had better be replaced.

    One that answers, however badly, may still be playing with others.
    """
    return state.silences >= policy.broken_after


def available(state: ServerState, now: float) -> bool:
    """A session may be asked of this server now."""
    if state.full and not state.idle:
        return False
    if state.limit is not None and state.leases >= state.limit:
        return False
    return not state.suspect or (now >= state.retry_at and not state.trial_out)


def choose(states: Iterable[ServerState], now: float) -> ServerState | None:
    """The least-loaded available server, healthy before suspect; None if there is none."""
    candidates = [state for state in states if available(state, now)]
    return min(candidates, key=lambda state: (state.leases, state.incidents), default=None)


def next_trial(states: Iterable[ServerState], now: float) -> float | None:
    """Seconds until a server that was put aside may be tried; None if none waits for that."""
    waits = [
        state.retry_at - now
        for state in states
        if state.suspect and not state.trial_out and not state.full and state.retry_at > now
    ]
    return min(waits, default=None)
