"""Traces for fine-tuning and rollouts have the same tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_engine import Script, ScriptedEngine, oracle

from manus_jax.agentgym.environments import open_environments
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.data.chat import ChatStream
from manus_jax.data.tasks import Task, read_tasks
from manus_jax.engines.protocol import Request
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.prompts import opening
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.trajectory import Trajectory, episode_specs
from manus_jax.traces import main

pytestmark = pytest.mark.slow

ENVIRONMENTS = ("babyai", "maze", "sqlgym", "textcraft", "weather", "webshop", "wordle")
LONG = 100_000  # the small tokenizer makes many tokens; nothing is to be cut


def told_apart(script: Script, task: Task) -> Script:
    """A script that hears the first observation without the instruction it is joined to."""
    action_format = format_for(environment(task.env))
    *_, last = opening(task, action_format, RolloutSettings()).before

    def heard(request: Request, observation: str) -> str:
        return script(request, observation.removeprefix(f"{last.content}\n\n"))

    return heard


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_a_trace_has_the_tokens_of_the_same_episode_played_through_an_engine(
    env: str, tmp_path: Path, engine_of: Callable[..., ScriptedEngine]
) -> None:
    path = tmp_path / "traces.parquet"
    main([env, "--n", "2", "--seed", "5", "--out", str(path)])
    traces = read_tasks(path, needs="conversation")
    settings = RolloutSettings(
        max_turns=200,
        max_total_tokens=LONG,
        max_observation_tokens=LONG,
        max_tokens_per_turn=2000,
    )
    with open_environments({env: "embedded"}) as pool:
        for trace in traces:
            engine = engine_of(told_apart(oracle(), trace), max_length=LONG)
            agent = EngineAgent(engine, engine.tokenizer)
            [played] = run_episodes(episode_specs([trace]), agent, pool, settings)
            assert isinstance(played, Trajectory) and played.success
            [segment] = played.segments
            [encoded] = ChatStream(engine.tokenizer).encode(trace.messages)
            assert encoded.input_ids.tolist() == segment.token_ids.tolist()
            assert encoded.loss_mask.tolist() == segment.loss_mask.tolist()


def test_the_prompt_of_a_trace_opens_the_same_episode_as_the_environments_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "traces.parquet"
    main(["maze", "--n", "1", "--out", str(path)])
    [task] = read_tasks(path)
    action_format = format_for(environment("maze"))
    told = [
        opening(task, action_format, RolloutSettings(prompt_source=source)).messages("seen")
        for source in ("dataset", "environment")
    ]
    assert told[0] == told[1]
