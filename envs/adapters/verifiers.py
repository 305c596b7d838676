"""`verifiers:NAME`: an environment of the package verifiers, which plays the agent itself.

A verifiers environment holds the whole conversation with the model and scores it by its rubric. So
an episode here has one step: its action says where the model is, as JSON with `base_url` and
`api_key`, and its reward is the rubric's. The package is only needed by the server; an item is a
row of the environment's data set, counted from the beginning again after the last.
"""

import asyncio
import functools
import json
from typing import Any

from envs.game import ClientView, EnvironmentSpec, GameError, Step, fixed_splits

TRAIN, TEST = range(10_000), range(10_000, 10_500)
STEP_SECONDS = 3600.0
INSTALL = "scripts/setup_env.sh verifiers --install 'verifiers<0.2' creates an interpreter with it"


def adapted(name: str) -> EnvironmentSpec:
    """The environment NAME, which `verifiers.load_environment` knows."""
    return EnvironmentSpec(
        name=f"verifiers:{name}",
        health="ok",
        family="id",
        item_field="data_idx",
        new_game=lambda: VerifiersGame(_environment(name)),
        items=fixed_splits(TRAIN, TEST),
        client=ClientView("", (), read_timeout=STEP_SECONDS),
        requirements=lambda: _missing(name),
    )


@functools.cache
def _environment(name: str) -> Any:
    import verifiers

    return verifiers.load_environment(name)


def _missing(name: str) -> str | None:
    try:
        import verifiers

        if not hasattr(verifiers, "load_environment"):  # 0.4 has other environments
            version = getattr(verifiers, "__version__", "another version")
            return f"verifiers:{name} needs verifiers 0.1, and {version} is installed: {INSTALL}"
        _environment(name)
    except ModuleNotFoundError as error:
        if error.name == "verifiers":
            return f"verifiers:{name} needs the package verifiers: {INSTALL}"
        return f"verifiers:{name} cannot be loaded: {error}"
    except Exception as error:  # whatever the environment raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"verifiers:{name} cannot be loaded: {reason}"
    return None


class VerifiersGame:
    """One rollout of the environment."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._row: Any = None

    def reset(self, item: int) -> str:
        environment = self._environment
        held_out = item >= TEST.start
        rows = environment.get_eval_dataset() if held_out else environment.get_dataset()
        self._row = rows[item % len(rows)]
        return "Where is the model?"

    def step(self, action: str) -> Step:
        if self._row is None:
            raise GameError("Reset before the next step.")
        try:
            where = json.loads(action)
            address, key = where["base_url"], where["api_key"]
        except (ValueError, LookupError, TypeError):
            raise GameError(
                "an environment of verifiers plays the agent itself: set rollout.strategy = "
                "'program' and its function to manus_jax.rollout.endpoint.delegated:play"
            ) from None
        output = asyncio.run(self._roll_out(address, key))
        self._row = None
        if output.get("error") is not None:  # the episode is played again, and then dropped
            raise GameError(f"the rollout failed: {output['error']}")
        return Step("", float(output["reward"]), True)

    def observation(self) -> str:
        return ""

    def close(self) -> None:
        pass

    async def _roll_out(self, address: str, key: str) -> Any:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=address, api_key=key) as client:
            chat = OpenAIChatCompletionsClient(client)
            return await self._environment.run_rollout(self._row, chat, "policy", {})
