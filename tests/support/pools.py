"""Pools of environment servers with a clock that does not wait."""

import threading

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.leases import Clock
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.server_settings import EnvPoolSettings


class JumpingClock(Clock):
    """Time passes only when somebody waits, and then at once."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        self.time += seconds


def pool_of(urls: list[str], clock: Clock | None = None, **settings: object) -> EnvironmentPool:
    given = {"connect_timeout": 2.0, "read_timeout": 0.3, **settings}
    steady = EnvPoolSettings(**given)  # type: ignore[arg-type]
    return EnvironmentPool(
        {"textcraft": urls}, steady, clock=clock or JumpingClock(), chance=lambda: 0.0
    )


def winning(session: Session) -> float:
    session.reset(5)
    session.step("look")
    session.step("win")
    return session.episode_reward
