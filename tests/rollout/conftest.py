"""Real environment servers and a real tokenizer for the tests of episodes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_engine import Script, ScriptedEngine, small_tokenizer

from manus_jax.agentgym.environments import open_environments
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.server_settings import EnvPoolSettings


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return small_tokenizer()


@pytest.fixture(scope="session")
def pool() -> Iterator[EnvironmentPool]:
    envs = dict.fromkeys(("maze", "textcraft", "wordle"), "embedded")
    settings = EnvPoolSettings(first_retry=0.01)
    with open_environments(envs, settings=settings) as opened:
        yield opened


@pytest.fixture
def engine_of(chat_tokenizer: Any) -> Iterator[Callable[..., ScriptedEngine]]:
    """(script, options) → an engine that says what the script tells it."""
    engines: list[ScriptedEngine] = []

    def make(script: Script, **options: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(chat_tokenizer, script, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
