"""Registration of environments from outside this project.

An environment consists of a table row (the protocol of its servers), a prompt, and optionally an
`EnvironmentSpec` with which servers can be started here. A module that calls `register_environment`
and is imported by the configuration (`import my_env` in a gin file) adds one.
"""

from envs.registry import ENVIRONMENTS as EMBEDDED
from manus_jax.agentgym.prompts import PROMPTS, EnvironmentPrompt
from manus_jax.agentgym.table import ENVIRONMENTS, EnvironmentRow


def register_environment(
    row: EnvironmentRow, prompt: EnvironmentPrompt, spec: str | None = None
) -> None:
    """Adds an environment under the name of its row.

    `spec` is the location of its EnvironmentSpec, as "my_env:SPEC"; without it, the environment can
    only be played on the servers of `env.urls`.
    """
    if spec is not None and not all(spec.partition(":")):
        raise ValueError(f"{row.name}: spec {spec!r} must have the form 'module:SPEC'")
    ENVIRONMENTS.add(row)
    PROMPTS[row.name] = prompt
    if spec is not None:
        EMBEDDED[row.name] = spec
