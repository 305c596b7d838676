"""The program for environments that play the agent themselves, such as those of verifiers."""

import json

from manus_jax.rollout.endpoint.programs import ProgramTask


def play(task: ProgramTask) -> None:
    """Passes the model's address to the environment, whose only step is the whole episode."""
    task.reset()
    task.environment.step(
        json.dumps({"base_url": task.base_url, "api_key": task.api_key}), is_action=False
    )
