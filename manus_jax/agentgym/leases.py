"""Leases on the servers of one environment.

Sessions are leased exclusively. A lease owns one session of one incarnation of a server from its
creation (or from the reuse of an idle session) until it is released. The state machine in
`server_state.py` decides what happens to a server; this module adds the lock, which is never held
during a call, the waiting and the HTTP calls.
"""

import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manus_jax.agentgym import server_state
from manus_jax.agentgym.client import Session
from manus_jax.agentgym.connection import Connection, server_root
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.incarnations import ServerIncarnation
from manus_jax.agentgym.server_state import EnvServerState, health_policy
from manus_jax.agentgym.table import EnvironmentRow
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.run_slots import SLOTS


class Clock:
    """The pool's clock; tests replace it."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Waits at most `seconds` on a condition whose lock is held."""
        SLOTS.leave()
        condition.wait(seconds)


@dataclass
class Lease:
    """A session in use; `trial`: it tests a server that was down."""

    session: Session
    incarnation: ServerIncarnation
    id: int | str
    trial: bool = False
    failure: EnvironmentFailure | None = None


@dataclass
class _Server:
    """One server: its state, its current incarnation, and idle leases with their last use."""

    state: EnvServerState
    incarnation: ServerIncarnation | None = None
    kept: list[tuple[Lease, float]] = field(default_factory=list)


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
        self._policy = health_policy(settings)
        self._clock = clock
        self._chance = chance
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._servers: dict[str, _Server] = {}
        self._stale: list[Lease] = []  # closed by the next thread that leases
        self._counts: Counter[str] = Counter()
        self._dropped: list[str] = []
        self._last_failure: EnvironmentFailure | None = None
        self._down_since: float | None = None  # when the last server was marked down
        self._closed = False
        for address in addresses:
            self._add(server_root(row, address))

    def acquire(self) -> Lease:
        """An exclusive session; raises EnvironmentFailure if none is free in `patience` seconds."""
        deadline = self._clock.now() + self._settings.patience
        while True:
            state, lease = self._grant(deadline)
            self._close_stale()
            try:
                if state.suspect:
                    self._check(state.url)
                lease = lease or self._created(state.url)
            except EnvironmentFailure as failure:
                if self._give_back(state.url, state.suspect, refused=failure.kind.refusal):
                    self.count(f"refusals/{failure.kind}")
                else:
                    self._note_failure(state.url, failure, creating=True)
                continue
            except BaseException:
                self._give_back(state.url, state.suspect)
                raise
            lease.trial = state.suspect
            lease.session.listener = functools.partial(self._on_call, lease)
            with self._changed:
                self._counts["leases"] += 1
                # There may be room for more sessions: wake one waiting thread.
                self._changed.notify()
            return lease

    def release(self, lease: Lease, clean: bool) -> None:
        """Releases a session, which is kept if it is clean and reusable, else closed or dropped."""
        session, url = lease.session, lease.session.root
        session.listener = None
        with self._changed:
            in_pool = url in self._servers and not self._closed
        keep = clean and in_pool and self._row.reuse and not lease.incarnation.ended()
        if keep or (lease.failure is not None and lease.failure.kind.lost_contact):
            session.disconnect()
        else:
            self._close_session(lease)
        self._give_back(url, lease.trial, kept=lease if keep else None)
        if not keep and self._row.recycles_ids:
            with self._changed:
                lease.incarnation.ids.discard(lease.id)

    def problems(self) -> dict[str, str]:
        """Why each server is down, by URL; "" if it is up."""
        with self._changed:
            return {url: server.state.health.problem for url, server in self._servers.items()}

    def put(self, address: str, instead_of: str | None) -> None:
        with self._changed:
            if instead_of is not None:
                self._remove(instead_of)
            self._add(server_root(self._row, address))
            self._down_since = None
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

    def ping(self) -> None:
        """Keeps the observation of all servers alive (see `incarnations.py`)."""
        with self._changed:
            observed = [server.incarnation for server in self._servers.values()]
        for incarnation in observed:
            if incarnation is not None:
                incarnation.ping()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for url in self._servers:
                self._stale += self._forget_kept(url)
            self._changed.notify_all()
        self._close_stale()

    def _check(self, url: str) -> None:
        connection = Connection(self._row, url, self._settings)
        try:
            connection.check()
        finally:
            connection.close()

    def _grant(self, deadline: float) -> tuple[EnvServerState, Lease | None]:
        """Reserves room on the best server; also returns an idle session of it, if any.

        Waits for room until the deadline.
        """
        with self._changed:
            while True:
                now = self._clock.now()
                if self._closed:
                    raise self._no_server("the pool is closed")
                if not self._servers:
                    raise self._no_server("there is no server")
                for url in self._servers:
                    self._stale += self._forget_kept(url, now - self._settings.keep_idle)
                state = server_state.choose(self._states(), now)
                if state is not None:
                    self._servers[state.url].state = server_state.granted(state)
                    return state, self._take_kept(state.url)
                if all(server_state.refuses(state, self._policy) for state in self._states()):
                    raise self._no_server("no server creates a session")
                if self._down_since is not None:
                    # Patience is for all episodes together: they do not wait one after another.
                    deadline = min(deadline, self._down_since + self._settings.patience)
                if now >= deadline:
                    # This thread may have consumed a wake-up on its timeout: pass it on.
                    self._changed.notify()
                    waited = self._settings.patience
                    raise self._no_server(f"no free session within {waited:g} s")
                trial = server_state.next_trial(self._states(), now)
                left = deadline - now
                self._clock.wait(self._changed, left if trial is None else min(trial, left))

    def _created(self, url: str) -> Lease:
        """A new session on a server, with an id that is not in use."""
        incarnation = self._incarnation(url)
        session = Session(self._row, url, self._settings, incarnation=incarnation)
        session.create()
        assert session.id is not None
        lease = Lease(session, incarnation, session.id)
        with self._changed:
            repeated = session.id in incarnation.ids
            incarnation.ids.add(session.id)
        if not repeated:
            return lease
        if self._row.recycles_ids:
            session.disconnect()
            detail = f"the server returned the id {lease.id}, which is in use"
            kind = FailureKind.DUPLICATE_ID
        else:
            # The server counts from 0 again, so it has restarted although it was never down.
            self._close_session(lease)
            incarnation.end()
            detail = f"the server has restarted: it returned the id {lease.id} again"
            kind = FailureKind.RESTARTED
        raise EnvironmentFailure(kind, self._row.name, url, "POST create", detail)

    def _incarnation(self, url: str) -> ServerIncarnation:
        """The current incarnation of a server, observed from before its first session on."""
        with self._changed:
            server = self._servers.get(url)
            current = server.incarnation if server else None
        if current is not None and not current.ended():
            return current
        observed = ServerIncarnation(self._row, url, self._settings)
        with self._changed:
            server = self._servers.get(url)
            if server is None or server.incarnation is not current:
                observed.end()  # the server was replaced, or another thread was faster
            else:
                server.incarnation = observed
            return (server and server.incarnation) or observed

    def _on_call(self, lease: Lease, failure: EnvironmentFailure | None) -> None:
        if failure is None:
            self._note_success(lease.session.root)
        else:
            lease.failure = failure
            if failure.kind is FailureKind.CONNECTION and not lease.incarnation.observed:
                lease.incarnation.end()
            self._note_failure(lease.session.root, failure)

    def _note_success(self, url: str) -> None:
        with self._changed:
            server = self._servers.get(url)
            if server is None:
                return
            before, server.state = server.state, server_state.succeeded(server.state)
            self._down_since = None
            if before.suspect or before.strikes:
                self._changed.notify_all()

    def _note_failure(self, url: str, failure: EnvironmentFailure, creating: bool = False) -> None:
        """Records a failed call; only a lost server or one that creates no session is at fault."""
        with self._changed:
            self._counts[f"failures/{failure.kind}"] += 1
            self._last_failure = failure
            server = self._servers.get(url)
            if server is None:
                return
            before = server.state
            if not creating and not failure.kind.lost_contact:
                if failure.kind not in (
                    FailureKind.ITEM,
                    FailureKind.RESTARTED,
                    FailureKind.OVERDUE,
                ):
                    server.state = server_state.refused(before)
                return
            now, chance = self._clock.now(), self._chance()
            after = server_state.failed(before, failure.kind, now, chance, self._policy)
            server.state = after
            if self._down_since is None and all(state.suspect for state in self._states()):
                self._down_since = now
            marked_down = after.health.incidents > before.health.incidents
            if marked_down:
                # Waiting threads must recompute the time of the next trial.
                self._changed.notify_all()
        if marked_down and server_state.broken(after, self._policy) and self._on_broken:
            self._on_broken(self._row.name, url)

    def _give_back(
        self, url: str, trial: bool, kept: Lease | None = None, refused: bool = False
    ) -> bool:
        """Frees room on a server, and possibly keeps the session for reuse.

        Returns True if the server refused the session only because it is full.
        """
        with self._changed:
            server = self._servers.get(url)
            if server is not None:
                move = server_state.refused_session if refused else server_state.released
                server.state = move(server.state, trial)
                if kept is not None:
                    self._keep(server, [*server.kept, (kept, self._clock.now())])
            # One session became free: wake one waiting thread.
            self._changed.notify()
            return refused and server is not None and (server.state.full or server.state.idle > 0)

    def _close_session(self, lease: Lease) -> None:
        if lease.incarnation.ended():
            # On the restarted server the id may belong to another session.
            lease.session.disconnect()
            return
        try:
            lease.session.close()
        except EnvironmentFailure:
            # The episode is complete; a session that cannot be closed expires on the server.
            self.count("failures/close")

    def _close_stale(self) -> None:
        with self._changed:
            stale, self._stale = self._stale, []
        for lease in stale:
            self._close_session(lease)

    # The following are called with the lock held.

    def _states(self) -> list[EnvServerState]:
        return [server.state for server in self._servers.values()]

    def _add(self, url: str) -> None:
        limits = (self._settings.sessions_per_server, self._row.sessions_per_server)
        limit = min((each for each in limits if each is not None), default=None)
        self._servers[url] = _Server(EnvServerState(url, limit))

    def _keep(self, server: _Server, leases: list[tuple[Lease, float]]) -> None:
        server.kept = leases
        server.state = server_state.keeping(server.state, len(leases))

    def _take_kept(self, url: str) -> Lease | None:
        """Removes and returns the most recently used idle session that is still valid."""
        server = self._servers[url]
        while server.kept:
            *others, (lease, _) = server.kept
            self._keep(server, others)
            if not lease.incarnation.ended():
                return lease
        return None

    def _forget_kept(self, url: str, before: float = math.inf) -> list[Lease]:
        """Drops idle sessions last used before a time, which their server may have expired."""
        server = self._servers[url]
        forgotten = [lease for lease, since in server.kept if since < before]
        if forgotten:
            self._keep(server, [(lease, since) for lease, since in server.kept if since >= before])
            server.state = server_state.made_room(server.state)
        if self._row.recycles_ids:
            for lease in forgotten:
                lease.incarnation.ids.discard(lease.id)
        return forgotten

    def _remove(self, url: str) -> None:
        server = self._servers.pop(url, None)
        if server is not None and server.incarnation is not None:
            server.incarnation.end()

    def _no_server(self, why: str) -> EnvironmentFailure:
        now = self._clock.now()
        lines = [_described(state, now) for state in self._states()] + self._dropped
        detail = f"{why}; " + "; ".join(lines)
        if self._last_failure is not None:
            detail += f"; last failure: {self._last_failure}"
        self._counts[f"failures/{FailureKind.NO_SERVER}"] += 1
        where = ", ".join(self._servers) or "no server"
        return EnvironmentFailure(FailureKind.NO_SERVER, self._row.name, where, "lease", detail)


def _described(state: EnvServerState, now: float) -> str:
    if state.suspect:
        wait = max(0.0, state.health.retry_at - now)
        return f"{state.url} failed {state.health.incidents} times, next trial in {wait:.0f} s"
    room = "" if state.limit is None else f" of {state.limit}"
    return f"{state.url} has {state.leases}{room} sessions in use"
