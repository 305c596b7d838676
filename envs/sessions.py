"""The live sessions of one server.

The table is ordered by last use, so expired sessions are always at its front and checking for them
is cheap. Session ids are random, so that other clients cannot guess them. The table takes an
injected clock and does no I/O. All calls come from the event loop's thread, so the table needs no
lock; each session has its own.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable

from envs.game import Game, GameError, Session

MAX_ID = 2**53
"""The protocol's ids are JSON integers, which not every client reads exactly beyond 2**53."""


def new_id() -> int:
    return secrets.randbelow(MAX_ID)


class SessionTable:
    """At most `max_sessions` live sessions, which expire when unused for `ttl` seconds.

    One client, which is a network address, has at most `max_per_client` of them.
    """

    def __init__(
        self, max_sessions: int, max_per_client: int, ttl: float, clock: Callable[[], float]
    ) -> None:
        self._max_sessions = max_sessions
        self._max_per_client = max_per_client
        self._ttl = ttl
        self._clock = clock
        self._created = 0
        self._sessions: OrderedDict[int, Session] = OrderedDict()

    def __contains__(self, session: Session) -> bool:
        return session.id in self._sessions

    def ids(self, client: str) -> list[int]:
        """The sessions of a client, oldest first."""
        mine = [s for s in self._sessions.values() if s.client == client]
        return [session.id for session in sorted(mine, key=lambda session: session.number)]

    def check_room(self, client: str) -> None:
        """Raises GameError if the server is full, or `client` has too many sessions."""
        if len(self._sessions) >= self._max_sessions:
            raise GameError(
                f"The server already has {self._max_sessions} live sessions: close some, "
                "or start it with a higher --max_sessions."
            )
        if len(self._sessions) >= self._max_per_client <= len(self.ids(client)):
            raise GameError(
                f"The client {client} already has {self._max_per_client} live sessions: close "
                "some, or start the server with a higher --max_sessions_per_client."
            )

    def add(self, game: Game, client: str) -> Session:
        """A new session for `game`."""
        self.check_room(client)
        while (session_id := new_id()) in self._sessions:
            pass
        session = Session(session_id, self._created, client, game, used_at=self._clock())
        self._created += 1
        self._sessions[session.id] = session
        return session

    def get(self, session_id: int) -> Session:
        """The live session with that id, marked as used now; GameError if there is none."""
        session = self._sessions.get(session_id)
        if session is None:
            raise GameError(f"The id {session_id} is not valid.")
        self.touch(session)
        return session

    def touch(self, session: Session) -> None:
        """Marks a session as used now, unless it has been removed."""
        session.used_at = self._clock()
        if session in self:
            self._sessions.move_to_end(session.id)

    def remove(self, session_id: int) -> Session | None:
        return self._sessions.pop(session_id, None)

    def take_expired(self) -> list[Session]:
        """Removes and returns expired sessions, except those in the middle of a request."""
        oldest_allowed = self._clock() - self._ttl
        expired = []
        for session in self._sessions.values():
            if session.used_at >= oldest_allowed:
                break
            if not session.lock.locked():
                expired.append(session)
        for session in expired:
            del self._sessions[session.id]
        return expired

    def take_all(self) -> list[Session]:
        """Removes and returns all sessions, at shutdown."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        return sessions
