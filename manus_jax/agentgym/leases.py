"""Leases on the servers of one environment.

Sessions are leased exclusively. A lease owns one session id on one server from its creation (or
from the reuse of an idle session) until it is released; an id that a server returns twice is
rejected. The state machine in `server_state.py` decides what happens to a server; this module adds
the lock, which is never held during a call, the waiting and the HTTP calls.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manus_jax.agentgym import server_state
from manus_jax.agentgym.client import Connection, Listener, Session, server_root
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.server_state import EnvServerState, health_policy
from manus_jax.agentgym.table import EnvironmentRow
from manus_jax.config.server_settings import EnvPoolSettings


class Clock:
    """The pool's clock; tests replace it."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Waits at most `seconds` on a condition whose lock is held."""
        condition.wait(seconds)


@dataclass
class Lease:
    """A session in use. `key` is its server and id; `trial`: the session tests a suspect server."""

    session: Session
    key: tuple[str, int | str]
    trial: bool
    failure: EnvironmentFailure | None = None


class LeaseGroup:
    """The servers of one environment, under one lock that is never held during a call."""

    def __init__(
        self,
        row: EnvironmentRow,
        addresses: Sequence[str],
        settings: EnvPoolSettings,
        clock: Clock,
        chance: Callable[[], float],
        on_broken: Callable[[str, str], None] | None,
    ) -> None:
        self._row = row
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._states: dict[str, EnvServerState] = {}
        self._kept: dict[str, list[tuple[Session, float]]] = {}  # with the time of last use
        self._stale: list[Session] = []  # closed by the next thread that leases
        self._ids_in_use: set[tuple[str, int | str]] = set()  # ids in use or kept idle
        self._counts: Counter[str] = Counter()
        self._dropped: list[str] = []
        self._last_failure: EnvironmentFailure | None = None
        self._closed = False
        for address in addresses:
            self._add(server_root(row, address))

    def acquire(self) -> Lease:
        """An exclusive session; raises EnvironmentFailure if none is free in `patience` seconds."""
        deadline = self._clock.now() + self._settings.patience
        while True:
            state, session = self._grant(deadline)
            self._close_stale()
            try:
                if state.suspect:
                    self._check(state.url)
                session = session or self._created(state.url)
            except EnvironmentFailure as failure:
                refused = failure.kind.refusal
                if self._give_back(state.url, state.suspect, session, refused=refused):
                    self.count(f"refusals/{failure.kind}")
                else:
                    self._note_failure(state.url, failure)
                continue
            except BaseException:
                self._give_back(state.url, state.suspect, session)
                raise
            assert session.id is not None
            lease = Lease(session, (state.url, session.id), trial=state.suspect)
            session.listener = self._listener(lease)
            with self._changed:
                self._counts["leases"] += 1
                # There may be room for more sessions: wake one waiting thread.
                self._changed.notify()
            return lease

    def release(self, lease: Lease, clean: bool) -> None:
        """Releases a session, which is kept if it is clean and reusable, else closed or dropped."""
        session, (url, identifier) = lease.session, lease.key
        session.listener = None
        with self._changed:
            in_pool = url in self._states and not self._closed
        keep = clean and in_pool and self._row.reuse and session.id == identifier
        if keep or (lease.failure is not None and lease.failure.kind.lost_contact):
            session.disconnect()
        else:
            self._close_session(session)
        if keep:
            self._give_back(url, lease.trial, kept=session)
        else:
            self._give_back(url, lease.trial, freed=identifier)

    def urls(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(self._states)

    def put(self, address: str, instead_of: str | None) -> None:
        with self._changed:
            if instead_of is not None:
                self._remove(instead_of)
            self._add(server_root(self._row, address))
            self._changed.notify_all()

    def drop(self, url: str, reason: str) -> None:
        with self._changed:
            self._remove(url)
            self._dropped.append(f"{url}: {reason}")
            self._changed.notify_all()

    def count(self, key: str) -> None:
        with self._changed:
            self._counts[key] += 1

    def counts(self) -> dict[str, int]:
        with self._changed:
            return dict(self._counts)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for url in self._kept:
                self._stale += self._forget_kept(url)
            self._changed.notify_all()
        self._close_stale()

    def _check(self, url: str) -> None:
        connection = Connection(self._row, url, self._settings)
        try:
            connection.check()
        finally:
            connection.close()

    def _grant(self, deadline: float) -> tuple[EnvServerState, Session | None]:
        """Reserves room on the best server; also returns an idle session of it, if any.

        Waits for room until the deadline.
        """
        with self._changed:
            while True:
                now = self._clock.now()
                if self._closed:
                    raise self._no_server("the pool is closed")
                if not self._states:
                    raise self._no_server("there is no server")
                self._forget_stale(now)
                state = server_state.choose(self._states.values(), now)
                if state is not None:
                    self._states[state.url] = server_state.granted(state)
                    return state, self._take_kept(state.url)
                if now >= deadline:
                    # This thread may have consumed a wake-up on its timeout: pass it on.
                    self._changed.notify()
                    waited = self._settings.patience
                    raise self._no_server(f"no free session within {waited:g} s")
                trial = server_state.next_trial(self._states.values(), now)
                left = deadline - now
                self._clock.wait(self._changed, left if trial is None else min(trial, left))

    def _created(self, url: str) -> Session:
        """A new session on a server, with an id that is not in use."""
        session = Session(self._row, url, self._settings)
        session.create()
        assert session.id is not None
        with self._changed:
            taken = (url, session.id) in self._ids_in_use
            self._ids_in_use.add((url, session.id))
        if taken:
            session.disconnect()
            detail = f"the server handed out the id {session.id}, which is in use"
            kind, call = FailureKind.DUPLICATE_ID, "POST create"
            raise EnvironmentFailure(kind, self._row.name, url, call, detail)
        return session

    def _listener(self, lease: Lease) -> Listener:
        def on_call(failure: EnvironmentFailure | None) -> None:
            if failure is not None:
                lease.failure = failure
                self._note_failure(lease.session.root, failure)
            else:
                self._note_success(lease.session.root)

        return on_call

    def _note_success(self, url: str) -> None:
        with self._changed:
            state = self._states.get(url)
            if state is not None and (state.suspect or state.strikes):
                self._states[url] = server_state.succeeded(state)
                self._changed.notify_all()

    def _note_failure(self, url: str, failure: EnvironmentFailure) -> None:
        policy = health_policy(self._settings)
        with self._changed:
            self._counts[f"failures/{failure.kind}"] += 1
            self._last_failure = failure
            before = self._states.get(url)
            if before is None:
                return
            now, chance = self._clock.now(), self._chance()
            after = server_state.failed(before, failure.kind, now, chance, policy)
            self._states[url] = after
            if failure.kind is FailureKind.CONNECTION:
                # The idle sessions were lost with the process.
                self._forget_kept(url)
            marked_down = after.health.incidents > before.health.incidents
            if marked_down:
                # Waiting threads must recompute the time of the next trial.
                self._changed.notify_all()
        if marked_down and server_state.broken(after, policy) and self._on_broken:
            self._on_broken(self._row.name, url)

    def _give_back(
        self,
        url: str,
        trial: bool,
        kept: Session | None = None,
        freed: int | str | None = None,
        refused: bool = False,
    ) -> bool:
        """Frees room on a server, and releases the session's id or keeps the session for reuse.

        Returns True if the server refused the session only because it is full.
        """
        with self._changed:
            if freed is not None:
                self._ids_in_use.discard((url, freed))
            if url in self._states:
                move = server_state.turned_away if refused else server_state.released
                self._states[url] = move(self._states[url], trial)
                if kept is not None:
                    self._keep(url, [*self._kept[url], (kept, self._clock.now())])
            # One session became free: wake one waiting thread.
            self._changed.notify()
            state = self._states.get(url)
            return refused and state is not None and (state.full or state.idle > 0)

    def _close_session(self, session: Session) -> None:
        try:
            session.close()
        except EnvironmentFailure:
            # The episode is complete; a session that cannot be closed expires on the server.
            self.count("failures/close")

    def _close_stale(self) -> None:
        with self._changed:
            stale, self._stale = self._stale, []
        for session in stale:
            self._close_session(session)

    # The following are called with the lock held.

    def _add(self, url: str) -> None:
        limits = (self._settings.sessions_per_server, self._row.sessions_per_server)
        limit = min((each for each in limits if each is not None), default=None)
        self._states[url] = EnvServerState(url, limit)
        self._kept[url] = []

    def _keep(self, url: str, sessions: list[tuple[Session, float]]) -> None:
        self._kept[url] = sessions
        self._states[url] = server_state.keeping(self._states[url], len(sessions))

    def _take_kept(self, url: str) -> Session | None:
        """Removes and returns the most recently used idle session."""
        if not self._kept[url]:
            return None
        *others, (session, _) = self._kept[url]
        self._keep(url, others)
        return session

    def _forget_stale(self, now: float) -> None:
        """Drops sessions that their server may have expired because they were idle too long."""
        for url, kept in self._kept.items():
            if kept and kept[0][1] < now - self._settings.keep_idle:
                self._stale += self._forget_kept(url, now - self._settings.keep_idle)

    def _forget_kept(self, url: str, before: float = math.inf) -> list[Session]:
        """Drops the idle sessions of a server that were last used before a time."""
        kept = self._kept[url]
        forgotten = [session for session, since in kept if since < before]
        self._ids_in_use -= {(url, session.id) for session in forgotten if session.id is not None}
        self._keep(url, [(session, since) for session, since in kept if since >= before])
        self._states[url] = server_state.forgetting(self._states[url])
        return forgotten

    def _remove(self, url: str) -> None:
        if url in self._states:
            self._forget_kept(url)
            del self._states[url], self._kept[url]

    def _no_server(self, why: str) -> EnvironmentFailure:
        now = self._clock.now()
        lines = [_described(state, now) for state in self._states.values()] + self._dropped
        detail = f"{why}; " + "; ".join(lines)
        if self._last_failure is not None:
            detail += f"; last failure: {self._last_failure}"
        self._counts[f"failures/{FailureKind.NO_SERVER}"] += 1
        where = ", ".join(self._states) or "no server"
        return EnvironmentFailure(FailureKind.NO_SERVER, self._row.name, where, "lease", detail)


def _described(state: EnvServerState, now: float) -> str:
    if state.suspect:
        wait = max(0.0, state.health.retry_at - now)
        return f"{state.url} failed {state.health.incidents} times, next trial in {wait:.0f} s"
    room = "" if state.limit is None else f" of {state.limit}"
    return f"{state.url} has {state.leases}{room} sessions in use"
