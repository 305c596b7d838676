"""The pool of environment servers: exclusive sessions, shared out over the healthy servers.

The one idea: an episode asks for a session and plays; which server it is on and whether that server
was down a minute ago is the pool's affair. Each environment is a `LeaseGroup` of its own, so one
that hangs delays nobody else.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.leases import Clock, LeaseGroup, PoolSettings
from manus_jax.agentgym.table import environment


class EnvironmentPool:
    """Sessions on the servers of several environments. Safe to use from many threads.

    `servers` lists the addresses by environment; more may come with `put_server`.
    `on_broken(env, url)` is called when a server stays down through several trials; whoever started
    it may replace it.
    """

    def __init__(
        self,
        servers: Mapping[str, Sequence[str]],
        settings: PoolSettings | None = None,
        *,
        clock: Clock | None = None,
        chance: Callable[[], float] = random.random,
        on_broken: Callable[[str, str], None] | None = None,
    ) -> None:
        self.settings = settings or PoolSettings()
        clock = clock or Clock()
        self._groups = {
            name: LeaseGroup(environment(name), urls, self.settings, clock, chance, on_broken)
            for name, urls in servers.items()
        }

    @property
    def environments(self) -> tuple[str, ...]:
        return tuple(self._groups)

    @contextmanager
    def lease(self, env: str) -> Iterator[Session]:
        """A session of its own for the length of the block; `reset` it to begin an episode.

        A failure in the block is noted on the server and passes on to the caller. Raises
        EnvironmentFailure (no_server) when no server can give a session in time.
        """
        group = self._group(env)
        held = group.acquire()
        clean = False
        try:
            yield held.session
            clean = held.failure is None
        finally:
            group.release(held, clean)

    def put_server(self, env: str, url: str, instead_of: str | None = None) -> None:
        """A server came up, perhaps in place of another, whose sessions are then forgotten."""
        self._group(env).put(url, instead_of)

    def drop_server(self, env: str, url: str, reason: str) -> None:
        """A server will not come back; leases that find no other one report the reason."""
        self._group(env).drop(url, reason)

    def counters(self) -> dict[str, int]:
        """Counts since the start: ENV/leases, ENV/refusals/KIND, ENV/failures/KIND and so on."""
        return {
            f"{name}/{key}": value
            for name, group in self._groups.items()
            for key, value in group.counts().items()
        }

    def close(self) -> None:
        """Ends kept sessions; leases asked for from now on are refused."""
        for group in self._groups.values():
            group.close()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _group(self, env: str) -> LeaseGroup:
        if env not in self._groups:
            environment(env)
            there = ", ".join(self._groups) or "none"
            raise ValueError(f"environment {env!r} is not open; open are: {there}")
        return self._groups[env]
