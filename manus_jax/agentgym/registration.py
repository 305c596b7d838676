"""Environments from outside this project, in one call.

An environment is three things: how its servers are spoken to, what the agent is told, and, where
the servers are to be started here, the place of what they serve. A module that calls
`register_environment` and is imported by the configuration (`import my_env` in a gin file) makes it
one like all the others.
"""

from envs.registry import ENVIRONMENTS as EMBEDDED
from manus_jax.agentgym.prompts import PROMPTS, EnvironmentPrompt
from manus_jax.agentgym.table import ENVIRONMENTS, EnvironmentRow


def register_environment(
    row: EnvironmentRow, prompt: EnvironmentPrompt, spec: str | None = None
) -> None:
    """Makes an environment known by the name of its row.

    `spec` is the place of its EnvironmentSpec, such as "my_env:SPEC"; without one it is played on
    the servers of `env.urls` alone.
    """
    if spec is not None and not all(spec.partition(":")):
        raise ValueError(f"{row.name}: spec {spec!r} is no place; write it as 'module:SPEC'")
    ENVIRONMENTS.add(row)
    PROMPTS[row.name] = prompt
    if spec is not None:
        EMBEDDED[row.name] = spec
