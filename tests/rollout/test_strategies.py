"""Strategies: the episodes of a spec, the selected attempt, and one-line errors."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from guide_examples import examples_for
from scripted_engine import ScriptedEngine, says, spec_of

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.commands import read_train_config
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.protocol import Request
from manus_jax.errors import UserError
from manus_jax.rewards import REWARDS, RewardUnavailable
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.strategies import (
    STRATEGIES,
    check_strategy,
    declares,
    episodes_per_spec,
    for_validation,
)
from manus_jax.rollout.trajectory import FailedEpisode, Trajectory

EngineOf = Callable[..., ScriptedEngine]
SETTINGS = RolloutSettings(prompt_layout="acknowledged", max_total_tokens=8192, max_turns=3)
EXAMPLES = examples_for(__file__, "docs/strategies.md")


def best_of(n: int, **parameters: object) -> RolloutSettings:
    given = {"n": n, **parameters}
    return dataclasses.replace(SETTINGS, strategy="best_of_n", strategy_parameters=given)


def play(agent, pool, settings, specs):
    return run_episodes(specs, agent, pool, settings)


def test_best_of_n_keeps_the_attempt_with_the_highest_environment_reward(
    pool: EnvironmentPool,
) -> None:
    # What the four attempts are worth when they are played as episodes of their own.
    spec = spec_of("textcraft_3")
    uids = [spec.uid, *(f"{spec.uid}~{attempt}" for attempt in (1, 2, 3))]
    long = dataclasses.replace(SETTINGS, max_turns=12)
    agent = RandomPolicy(seed=4)
    separate = play(agent, pool, long, [dataclasses.replace(spec, uid=uid) for uid in uids])
    rewards = [t.env_reward for t in separate]
    four = dataclasses.replace(best_of(4), max_turns=12)
    (best,) = play(agent, pool, four, [spec])
    assert best.env_reward == max(rewards)
    first = separate[rewards.index(max(rewards))]
    assert best.uid == first.uid and best.group_id == spec.group_id
    assert [turn.action for turn in best.turns] == [turn.action for turn in first.turns]
    assert best.score is None, "the training reward is computed later, by the run's own function"


def numbered(request: Request) -> int:
    """The attempt that a request belongs to."""
    found = re.search(r"~(\d+)", request.session)
    return int(found[1]) if found else 0


def test_the_selected_episode_has_exactly_the_tokens_that_the_engine_sampled(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    def script(request: Request, observation: str) -> str:
        return "Thought: " + "so " * (5 if numbered(request) == 2 else 1) + "\nAction:\nmove up"

    engine = engine_of(script)
    agent = EngineAgent(engine, engine.tokenizer)
    with REWARDS.restored():

        @REWARDS.register("longest_text")
        def longest_text(solution_str, ground_truth, **facts):
            return float(len(solution_str))

        (best,) = play(agent, pool, best_of(3, select="longest_text"), [spec_of("maze_3")])
    assert best.uid.endswith("~2")
    sampled = engine.generations[-len(best.turns) :]  # attempts follow each other
    (segment,) = best.segments
    mask = segment.loss_mask
    assert segment.token_ids[mask].tolist() == [x for made in sampled for x in made.token_ids]
    assert segment.log_probs[mask].tolist() == [x for made in sampled for x in made.log_probs]
    assert segment.versions[mask].tolist() == [x for made in sampled for x in made.versions]
    assert not engine.open_sessions, "the sessions of all attempts are released"


def test_attempts_that_fail_or_cannot_be_scored_are_not_selected(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    with REWARDS.restored():

        @REWARDS.register("absent_judge")
        def absent_judge(solution_str, ground_truth, **facts):
            raise RewardUnavailable("the judge failed: nobody answers")

        (dropped,) = play(
            OraclePolicy(), pool, best_of(2, select="absent_judge"), [spec_of("maze_3")]
        )
    assert isinstance(dropped, FailedEpisode) and dropped.kind == "reward"
    assert "nobody answers" in dropped.error

    def fails_once(request: Request, observation: str) -> str:
        if numbered(request) == 0:
            raise ZeroDivisionError("a bug")
        return "Thought: up\nAction:\nmove up"

    engine = engine_of(fails_once)
    agent = EngineAgent(engine, engine.tokenizer)
    (broken,) = play(agent, pool, best_of(2), [spec_of("maze_3")])
    assert isinstance(broken, FailedEpisode) and broken.kind == "error", "a bug is not hidden"
    short = dataclasses.replace(best_of(2), max_total_tokens=32)
    (failed,) = play(agent, pool, short, [spec_of("maze_3")])
    assert isinstance(failed, FailedEpisode) and failed.kind == "prompt_too_long"


def test_a_strategy_may_make_several_episodes_of_a_spec(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says("Thought: up\nAction:\nmove up"))
    with STRATEGIES.restored():

        @STRATEGIES.register("twice")
        @declares(episodes=lambda: 2, in_validation=False)
        def twice(spec, rollout):
            return [rollout.play(spec, attempt) for attempt in range(2)]

        settings = dataclasses.replace(SETTINGS, strategy="twice")
        assert episodes_per_spec(settings) == 2
        assert for_validation(settings) == SETTINGS
        seen: list[tuple[int, str]] = []
        specs = [spec_of("maze_3", 0), spec_of("maze_3", 1)]
        played = run_episodes(
            specs,
            EngineAgent(engine, engine.tokenizer),
            pool,
            settings,
            lambda index, outcome: seen.append((index, outcome.spec.uid)),
        )
    assert [t.uid for t in played] == ["maze_3#0", "maze_3#0~1", "maze_3#1", "maze_3#1~1"]
    assert all(isinstance(t, Trajectory) for t in played)
    assert sorted(seen) == [(0, "maze_3#0"), (0, "maze_3#0~1"), (1, "maze_3#1"), (1, "maze_3#1~1")]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda spec, rollout: None, "returned None, which is not an episode"),
        (lambda spec, rollout: [], "returned 0 episodes and declares 1 to 2"),
        (
            lambda spec, rollout: [rollout.play(spec, n) for n in range(3)],
            "returned 3 episodes and declares 1 to 2",
        ),
        (lambda spec, rollout: [rollout.play(spec)] * 2, "two episodes with the same uid"),
    ],
)
def test_what_a_strategy_returns_is_checked(
    strategy: Callable[..., object], message: str, pool: EnvironmentPool
) -> None:
    with STRATEGIES.restored():
        STRATEGIES.register("mine")(declares(episodes=lambda: 2)(strategy))
        settings = dataclasses.replace(SETTINGS, strategy="mine")
        (failed,) = play(OraclePolicy(), pool, settings, [spec_of("maze_3")])
    assert isinstance(failed, FailedEpisode) and message in failed.error


@pytest.mark.parametrize(
    ("strategy", "parameters", "message"),
    [
        ("best_of_m", {}, "unknown rollout strategy 'best_of_m'; did you mean 'best_of_n'?"),
        ("episode", {"n": 2}, "rollout strategy 'episode' has no parameter 'n'; it has none"),
        ("best_of_n", {"n": 1}, "rollout strategy 'best_of_n': n = 1 attempts: from 2 to 1000"),
        ("best_of_n", {"n": 2.5}, "rollout strategy 'best_of_n': n = 2.5 must be int"),
        ("best_of_n", {"select": "envy"}, "unknown reward function 'envy'; did you mean 'env'?"),
        ("best_of_n", {"select": "judge"}, "reward function 'judge' needs the parameter 'model'"),
    ],
)
def test_a_wrong_strategy_is_one_line(strategy: str, parameters: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        check_strategy(RolloutSettings(strategy=strategy, strategy_parameters=parameters))
    assert "\n" not in str(raised.value)


def test_the_documented_bindings_are_valid(tmp_path: Path) -> None:
    for example in EXAMPLES:
        (tmp_path / "example.gin").write_text(example)
        required = ["train.run_dir = 'runs/x'", "env.names = ['maze']"]
        check_strategy(read_train_config([str(tmp_path / "example.gin")], required).rollout)
