"""Rollouts of models that think: thoughts of earlier turns, and the budget of a thought."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import OPENING, QWEN3, tokenizer_with
from scripted_engine import ScriptedEngine, says, spec_of

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.settings import ChatSettings, RolloutSettings
from manus_jax.engines.protocol import Request
from manus_jax.rollout.batch import RewardAllocation, to_batch
from manus_jax.rollout.episode import play_episode
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.metrics import rollout_metrics
from manus_jax.rollout.trajectory import Trajectory
from manus_jax.rollout.trajectory_files import read_trajectories, write_trajectories

ANSWER = "Thought:\nup\n\nAction:\nmove up"
TURN = f"<think>\nThe goal is above me.\n</think>\n\n{ANSWER}"


@pytest.fixture
def qwen3() -> Iterator[Any]:
    """(script, options) → an engine with Qwen3's template."""
    engines: list[ScriptedEngine] = []

    def make(script: Any, template: str = QWEN3, **options: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(tokenizer_with(template), script, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def played(
    engine: ScriptedEngine, pool: EnvironmentPool, chat: dict[str, Any], **changes: Any
) -> Trajectory:
    settings = {"max_turns": 4, "max_total_tokens": 8192, "max_tokens_per_turn": 600, **changes}
    agent = EngineAgent(engine, engine.tokenizer, 0, ChatSettings(**chat))
    outcome = play_episode(spec_of("maze_3"), agent, pool, RolloutSettings(**settings))
    assert isinstance(outcome, Trajectory), outcome
    return outcome


def as_template_shows(engine: ScriptedEngine, trajectory: Trajectory, turns: int) -> list[int]:
    """The prompt of a turn, rendered in one go."""
    chat = [{"role": m.role, "content": m.content} for m in trajectory.opening]
    for turn in trajectory.turns[:turns]:
        chat.append({"role": "assistant", "content": turn.text})
        chat.append({"role": "user", "content": turn.observation})
    return engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def sampled_once(engine: ScriptedEngine, trajectory: Trajectory) -> bool:
    """Whether every sampled token has a loss in exactly one segment, in order."""
    trained = [i for s in trajectory.segments for i in s.token_ids[s.loss_mask].tolist()]
    return trained == [i for made in engine.generations for i in made.token_ids]


def test_kept_thoughts_extend_one_segment(qwen3: Any, pool: EnvironmentPool) -> None:
    engine = qwen3(says(TURN))
    trajectory = played(engine, pool, {"thinking": "keep"})
    assert len(trajectory.segments) == 1 and sampled_once(engine, trajectory)
    assert [turn.action for turn in trajectory.turns] == ["move up"] * 4
    assert (trajectory.prompts_extended, trajectory.prompts_forked) == (3, 0)
    assert trajectory.forked_tokens == 0
    assert engine.tokenizer.decode(engine.requests[-1].prompt_ids).count("The goal is above") == 3


def test_stripped_thoughts_fork_and_every_token_is_trained_once(
    qwen3: Any, pool: EnvironmentPool
) -> None:
    engine = qwen3(says(TURN))
    trajectory = played(engine, pool, {"thinking": "strip"})
    assert len(trajectory.segments) == 4 and sampled_once(engine, trajectory)
    for number, request in enumerate(engine.requests):
        assert list(request.prompt_ids) == as_template_shows(engine, trajectory, number)
        assert "The goal is above" not in engine.tokenizer.decode(request.prompt_ids)
    for number, segment in enumerate(trajectory.segments):
        assert set(segment.turn_ids[segment.loss_mask]) == {number}
    assert (trajectory.prompts_extended, trajectory.prompts_forked) == (0, 3)
    repeated = sum(len(request.prompt_ids) for request in engine.requests[1:])
    metrics = rollout_metrics([trajectory])
    assert metrics["rollout/prompt_forked"] == 3
    assert metrics["rollout/forked_tokens"] == repeated
    batch = to_batch([trajectory], RewardAllocation("last_token"))
    assert int(batch.batch["loss_mask"].sum()) == trajectory.agent_tokens
    assert engine.open_sessions == set()


def test_turns_without_thoughts_do_not_fork(qwen3: Any, pool: EnvironmentPool) -> None:
    engine = qwen3(says([ANSWER, TURN, ANSWER, ANSWER]))
    trajectory = played(engine, pool, {"thinking": "strip"})
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 1, 1]
    assert sampled_once(engine, trajectory)


def test_stripping_and_bounded_memory_go_together(qwen3: Any, pool: EnvironmentPool) -> None:
    engine = qwen3(says(TURN))
    trajectory = played(engine, pool, {"thinking": "strip"}, memory_turns=1)
    last = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert "2 earlier turns are left out" in last and "The goal is above" not in last
    assert last.count(ANSWER) == 1
    assert sampled_once(engine, trajectory)


def test_thinking_that_is_off_is_off_in_every_prompt(qwen3: Any, pool: EnvironmentPool) -> None:
    engine = qwen3(says(ANSWER))
    trajectory = played(engine, pool, {"thinking": "off"})
    assert len(trajectory.segments) == 1 and sampled_once(engine, trajectory)
    for request in engine.requests:
        assert engine.tokenizer.decode(request.prompt_ids).endswith("<think>\n\n</think>\n\n")


def thinks_too_long(request: Request, _: str) -> str:
    # The last four tokens tell whether the thought has been ended.
    return ANSWER if "</think>" in decoded(request.prompt_ids[-12:]) else "<think>\n" + "why? " * 99


def decoded(ids: Any) -> str:
    return tokenizer_with(QWEN3).decode(list(ids))


def test_a_thought_over_its_budget_is_ended_and_the_end_is_not_trained(
    qwen3: Any, pool: EnvironmentPool, tmp_path: Path
) -> None:
    engine = qwen3(thinks_too_long)
    trajectory = played(engine, pool, {}, thinking_tokens=40, max_turns=2)
    [segment] = trajectory.segments
    end = engine.tokenizer("\n</think>\n\n", add_special_tokens=False)["input_ids"]
    assert [turn.action for turn in trajectory.turns] == ["move up", "move up"]
    assert [turn.forced for turn in trajectory.turns] == [len(end)] * 2
    assert [request.sampling.max_tokens for request in engine.requests[:2]] == [
        40,
        600 - 40 - len(end),
    ]
    assert engine.requests[0].seed != engine.requests[1].seed
    for turn in trajectory.turns:
        forced = slice(turn.start + 40, turn.start + 40 + len(end))
        assert segment.token_ids[forced].tolist() == end
        assert not segment.loss_mask[forced].any()
        assert (segment.versions[forced] == -1).all() and (segment.log_probs[forced] == 0).all()
        assert segment.loss_mask[turn.start : turn.stop].sum() == turn.stop - turn.start - len(end)
        assert not turn.cut
    assert sampled_once(engine, trajectory)
    assert trajectory.agent_tokens == segment.loss_mask.sum()
    assert rollout_metrics([trajectory])["response_length/forced_thought_ratio"] == 1
    [again] = read_trajectories(write_trajectories(tmp_path, 1, [trajectory]))
    assert isinstance(again, Trajectory) and again.turns == trajectory.turns
    for name in ("token_ids", "loss_mask", "log_probs", "versions", "turn_ids"):
        np.testing.assert_array_equal(getattr(again.segments[0], name), getattr(segment, name))


@pytest.mark.parametrize("text", [TURN, ANSWER, "never a thought " * 20 + ANSWER])
def test_a_budget_does_not_touch_turns_without_an_open_thought(
    text: str, qwen3: Any, pool: EnvironmentPool
) -> None:
    def resumes(request: Request, _: str) -> str:
        said = decoded(request.prompt_ids).rpartition("<|im_start|>assistant\n")[2]
        return text.removeprefix(said)

    trajectory = played(qwen3(resumes), pool, {}, thinking_tokens=60, max_turns=2)
    assert [(turn.forced, turn.text) for turn in trajectory.turns] == [(0, text)] * 2


def test_an_unfinished_thought_that_the_template_opened_is_not_an_action(
    qwen3: Any, pool: EnvironmentPool
) -> None:
    engine = qwen3(says([f"I could write {ANSWER}", f"hm\n</think>\n\n{ANSWER}"]), OPENING)
    trajectory = played(engine, pool, {}, max_turns=2)
    assert [turn.valid for turn in trajectory.turns] == [False, True]
    assert "thought is not finished" in trajectory.turns[0].observation
    assert trajectory.turns[1].text == f"<think>\nhm\n</think>\n\n{ANSWER}"
