"""Environments of the real package verifiers: rollouts through the endpoint, rubrics as rewards."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, says, small_tokenizer, spec_of
from test_adapters_training import train

from manus_jax.agentgym.environments import open_environments, register_adapted
from manus_jax.config.settings import RolloutSettings, ScratchSettings
from manus_jax.engines.protocol import EngineError, Request
from manus_jax.models import huggingface, loading
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.trajectory import FailedEpisode, Outcome, Trajectory
from manus_jax.servers.processes import ServerSetupError

PYTHON = os.environ.get("MANUS_JAX_VERIFIERS_PYTHON", "")
ENV = "verifiers:echo_letters"
SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = {"function": "manus_jax.rollout.endpoint.delegated:play"}
SETTINGS = RolloutSettings(
    max_total_tokens=512,
    max_tokens_per_turn=32,
    strategy="program",
    strategy_parameters=PROGRAM,
)

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="MANUS_JAX_VERIFIERS_PYTHON has no interpreter with verifiers"
)


def test_a_rollout_of_verifiers_is_an_episode_with_exact_tokens_and_its_rubric(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    register_adapted(ENV)
    engine = ScriptedEngine(small_tokenizer(), says(["ab", "cd"] * 4))
    agent = EngineAgent(engine, engine.tokenizer)
    with open_environments({ENV: "embedded"}, interpreters={ENV: PYTHON}) as pool:
        [played] = run_episodes([spec_of(f"{ENV}_3")], agent, pool, SETTINGS)
        plain = RolloutSettings(max_total_tokens=512, action_format="raw")
        [refused] = run_episodes([spec_of(f"{ENV}_4")], agent, pool, plain)
    agent.close()
    engine.close()
    assert isinstance(played, Trajectory), played
    assert (played.env_reward, played.end_reason) == (0.5, "done")  # four letters of eight
    assert [turn.text for turn in played.turns] == ["ab", "cd"] and played.turns[0].valid
    [segment] = played.segments
    prompt, last = engine.requests[1].prompt_ids, engine.generations[1].token_ids
    assert segment.token_ids.tolist() == [*prompt, *last]
    assert "Write 3." in engine.tokenizer.decode(list(prompt))
    assert isinstance(refused, FailedEpisode) and "plays the agent itself" in refused.error
    other = "verifiers:no_such_environment"
    register_adapted(other)
    with (
        pytest.raises(ServerSetupError, match="verifiers:no_such_environment cannot be loaded"),
        open_environments({other: "embedded"}, interpreters={other: PYTHON}),
    ):
        pass


def test_limits_and_failures_of_the_model_are_those_of_any_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    register_adapted(ENV)
    engine = ScriptedEngine(small_tokenizer(), says(["ab" * 9] * 9))
    agent = EngineAgent(engine, engine.tokenizer)
    with open_environments({ENV: "embedded"}, interpreters={ENV: PYTHON}) as pool:

        def play(**changed: int) -> Outcome:
            limited = dataclasses.replace(SETTINGS, **changed)
            [outcome] = run_episodes([spec_of(f"{ENV}_3")], agent, pool, limited)
            return outcome

        whole = play()
        first = play(max_total_tokens=20)
        second = play(max_total_tokens=len(engine.requests[1].prompt_ids))
        turns = play(max_turns=1)

        def lost(request: Request) -> Any:
            raise EngineError("the server is down")

        monkeypatch.setattr(engine, "submit", lost)
        engine_lost = play()
    agent.close()
    engine.close()
    assert isinstance(whole, Trajectory) and len(whole.turns) == 2
    assert isinstance(first, FailedEpisode) and first.kind == "prompt_too_long", first
    assert isinstance(second, Trajectory), second  # the rubric scores what there is
    assert (len(second.turns), second.end_reason) == (1, "context")
    assert isinstance(turns, FailedEpisode) and "1 turns left (rollout.max_turns)" in turns.error
    assert isinstance(engine_lost, FailedEpisode)
    assert (engine_lost.kind, engine_lost.error) == ("engine", "the server is down")


def test_an_environment_of_verifiers_is_trained_on(tmp_path: Path) -> None:
    small = ScratchSettings(
        vocab_size=270, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, head_dim=16
    )
    source = loading.from_scratch(small, ["Write 3. And again."] * 3, 0, tmp_path / "card")
    huggingface.save_hf(source.load(None), source.card, tmp_path / "model")
    lines = train(
        tmp_path,
        ENV,
        f"env.python = {{{ENV!r}: {PYTHON!r}}}",
        "rollout.strategy = 'program'",
        f"rollout.strategy_parameters = {PROGRAM}",
        "model.path = 'model'",
        "warm_start.steps = 0",
        "train.baselines = []",
        scratch=False,
    )
    assert all(line["actor/grad_norm"] > 0 for line in lines[-2:])
    assert 0 < lines[-1]["episode/reward/mean"] < 1
