"""Episodes that are played again where infrastructure fails, as rollouts do."""

from collections.abc import Callable
from typing import TypeVar

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.failures import EnvironmentFailure
from manus_jax.agentgym.pool import EnvironmentPool

Result = TypeVar("Result")


def played(pool: EnvironmentPool, env: str, episode: Callable[[Session], Result]) -> Result:
    """What the episode returns; a failure that may pass costs one of the pool's attempts."""
    for _ in range(pool.settings.attempts - 1):
        try:
            with pool.lease(env) as session:
                return episode(session)
        except EnvironmentFailure as failure:
            if not failure.retryable:
                raise
    with pool.lease(env) as session:
        return episode(session)
