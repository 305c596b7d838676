"""The pool of environment servers: exclusive sessions on healthy servers.

An episode leases a session and plays; the pool chooses the server and handles servers that are
down. Each environment has its own `LeaseGroup`, so a hanging one does not delay the others.
"""

import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.incarnations import PING_SECONDS
from manus_jax.agentgym.leases import Clock, LeaseGroup
from manus_jax.agentgym.table import environment
from manus_jax.config.server_settings import EnvPoolSettings


class EnvironmentPool:
    """Sessions on the servers of several environments. Safe to use from many threads.

    `servers` lists the addresses by environment; `put_server` adds more. `on_broken(env, url)` is
    called when a server stays down through several trials, so that its owner can replace it.
    """

    def __init__(
        self,
        servers: Mapping[str, Sequence[str]],
        settings: EnvPoolSettings | None = None,
        *,
        clock: Clock | None = None,
        chance: Callable[[], float] = random.random,
        on_broken: Callable[[str, str], None] | None = None,
    ) -> None:
        self.settings = settings or EnvPoolSettings()
        clock = clock or Clock()
        self._groups = {
            name: LeaseGroup(environment(name), urls, self.settings, clock, chance, on_broken)
            for name, urls in servers.items()
        }
        self._closing = threading.Event()
        threading.Thread(target=self._ping, name="environment pings", daemon=True).start()

    @property
    def environments(self) -> tuple[str, ...]:
        return tuple(self._groups)

    @contextmanager
    def lease(
        self, env: str, deadline: Callable[[], float] = lambda: math.inf
    ) -> Iterator[Session]:
        """An exclusive session for the duration of the block; `reset` it to begin an episode.

        `deadline` is called when there is a session. At the time that it returns, of the monotonic
        clock, the session's calls fail (overdue).
        A failure in the block counts against the server and propagates to the caller. Raises
        EnvironmentFailure (no_server) when no server has a session in time.
        """
        group = self._group(env)
        lease = group.acquire()
        lease.session.limit(deadline())
        clean = False
        try:
            yield lease.session
            clean = lease.failure is None
        finally:
            group.release(lease, clean)

    def put_server(self, env: str, url: str, instead_of: str | None = None) -> None:
        """Adds a server, possibly replacing another, whose sessions are then dropped."""
        self._group(env).put(url, instead_of)

    def drop_server(self, env: str, url: str, reason: str) -> None:
        """Removes a server permanently; leases that find no other server report the reason."""
        self._group(env).drop(url, reason)

    def problems(self) -> dict[str, str]:
        """Why each server is down, by URL; "" if it is up."""
        return {u: p for group in self._groups.values() for u, p in group.problems().items()}

    def counters(self) -> dict[str, int]:
        """Counts since the start: ENV/leases, ENV/refusals/KIND, ENV/failures/KIND."""
        return {
            f"{name}/{key}": value
            for name, group in self._groups.items()
            for key, value in group.counts().items()
        }

    def close(self) -> None:
        """Closes idle sessions and refuses new leases."""
        self._closing.set()
        for group in self._groups.values():
            group.close()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ping(self) -> None:
        while not self._closing.wait(PING_SECONDS):
            for group in self._groups.values():
                group.ping()

    def _group(self, env: str) -> LeaseGroup:
        if env not in self._groups:
            environment(env)
            there = ", ".join(self._groups) or "none"
            raise ValueError(f"environment {env!r} is not open; open are: {there}")
        return self._groups[env]
