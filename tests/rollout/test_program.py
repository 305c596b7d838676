"""Programs as episodes: exact tokens, three sources of rewards, and all kinds of failure."""

import dataclasses
import gc
import logging
import math
import resource
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import maze_programs
import numpy as np
import pytest
from scripted_engine import ScriptedEngine, says, spec_of

from envs.registry import load
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import Cancellation
from manus_jax.engines.protocol import EngineError, Request
from manus_jax.rollout.baseline_players import OraclePolicy
from manus_jax.rollout.batch import RewardAllocation, to_batch
from manus_jax.rollout.endpoint.programs import ProgramTask, reward_of, running_command
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.strategies import StrategyError, check_strategy
from manus_jax.rollout.trajectory import FailedEpisode, Outcome, Trajectory

PLAIN = RolloutSettings(max_turns=30, max_total_tokens=8192, max_tokens_per_turn=64)


def running(**parameters: Any) -> RolloutSettings:
    more = {"strategy": "program", "strategy_parameters": parameters}
    return dataclasses.replace(PLAIN, **more)


def function(name: str, **parameters: Any) -> RolloutSettings:
    return running(function=f"maze_programs:{name}", **parameters)


def oracle_action() -> Callable[[Request, str], str]:
    policies: dict[str, Any] = {}

    def script(request: Request, seen: str) -> str:
        episode = request.session.rsplit("/", 1)[0]
        item = int(episode.split("#")[0].rpartition("_")[2])
        return policies.setdefault(episode, load("maze").oracle(item))(seen).action

    return script


def play(
    engine: ScriptedEngine, pool: EnvironmentPool, settings: RolloutSettings, *items: str
) -> list[Outcome]:
    agent = EngineAgent(engine, engine.tokenizer)
    try:
        specs = [spec_of(item, number) for number, item in enumerate(items or ("maze_3",))]
        return run_episodes(specs, agent, pool, settings)
    finally:
        agent.close()


@pytest.fixture(autouse=True)
def forget() -> None:
    maze_programs.KEYS.clear()
    maze_programs.CALLS.clear()


@pytest.mark.parametrize("name", ["plays", "plays_asynchronously"])
def test_a_program_wins_the_maze_and_its_trajectory_has_the_exact_tokens(
    name: str, pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    engine = engine_of(oracle_action())
    [won] = play(engine, pool, function(name))
    assert isinstance(won, Trajectory), won
    assert (won.env_reward, won.success, won.end_reason, won.attempts) == (1.0, True, "done", 1)
    [segment] = won.segments
    last, prompt = engine.generations[-1], engine.requests[-1].prompt_ids
    assert segment.token_ids.tolist() == [*prompt, *last.token_ids]
    sampled = [token for made in engine.generations for token in made.token_ids]
    assert segment.token_ids[segment.loss_mask].tolist() == sampled
    log_probs = np.array([p for made in engine.generations for p in made.log_probs], np.float32)
    assert np.array_equal(segment.log_probs[segment.loss_mask], log_probs)
    assert [turn.action for turn in won.turns] == [turn.text for turn in won.turns]
    assert sum(turn.reward for turn in won.turns) == 1.0 == won.turns[-1].reward
    assert (won.prompts_extended, won.prompts_forked) == (len(won.turns) - 1, 0)
    batch = to_batch([won], RewardAllocation("per_turn"))
    assert float(batch.batch["token_level_rewards"].sum()) == 1.0
    assert engine.open_sessions == set()
    assert {request.sampling.temperature for request in engine.requests} == {1.0}


def test_a_program_that_plays_as_the_episode_loop_does_makes_the_same_episode(
    pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    loop, program = engine_of(oracle_action()), engine_of(oracle_action())
    plain = dataclasses.replace(PLAIN, prompt_source="observation", action_format="raw")
    [one] = play(loop, pool, plain)
    [other] = play(program, pool, function("plays"))
    assert isinstance(one, Trajectory) and isinstance(other, Trajectory)
    assert [(r.prompt_ids, r.seed, r.sampling) for r in loop.requests] == [
        (r.prompt_ids, r.seed, r.sampling) for r in program.requests
    ]
    for field in dataclasses.fields(one.segments[0]):
        values = [getattr(episode.segments[0], field.name) for episode in (one, other)]
        assert np.array_equal(*values), field.name
    same = ("text", "action", "observation", "reward", "segment", "start", "stop")
    for mine, its in zip(one.turns, other.turns, strict=True):
        assert [getattr(mine, name) for name in same] == [getattr(its, name) for name in same]


def test_the_turn_limit_and_the_context_end_an_episode_that_the_environment_scores(
    pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    engine = engine_of(says("look"))
    turns = dataclasses.replace(function("plays"), max_turns=2)
    [ended] = play(engine, pool, turns)
    assert isinstance(ended, Trajectory), ended
    assert (len(ended.turns), ended.end_reason, ended.env_reward) == (2, "max_turns", 0.0)
    tokens = dataclasses.replace(function("plays"), max_total_tokens=400)
    [ended] = play(engine, pool, tokens)
    assert isinstance(ended, Trajectory), ended
    assert ended.end_reason == "context" and len(ended.segments[0]) <= 400


def test_a_reply_that_is_not_waited_for_does_not_hide_the_limit(
    pool: EnvironmentPool,
    engine_of: Callable[..., ScriptedEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    over = threading.Event()

    def script(request: Request, seen: str) -> str:
        if seen == "slow":
            maze_programs.CALLS.append(seen)
            over.wait(20)
        return "look"

    limited = dataclasses.replace(function("asks_twice_at_once"), max_turns=2)
    try:
        [ended] = play(engine_of(script), pool, limited)
    finally:
        over.set()
    assert isinstance(ended, Trajectory), ended
    assert (len(ended.turns), ended.end_reason) == (1, "max_turns")
    gc.collect()  # asyncio reports forgotten exceptions when it frees them
    assert not caplog.records


def test_a_program_may_score_itself_or_leave_it_to_the_reward_function(
    pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    [scored] = play(engine_of(says("0.25")), pool, function("scores_itself", reward="result"))
    assert isinstance(scored, Trajectory), scored
    assert (scored.env_reward, scored.success, scored.end_reason) == (0.25, False, "done")
    assert scored.turns[0].reward == 0.25
    [left] = play(engine_of(says("hm")), pool, function("never_plays", reward="function"))
    assert isinstance(left, Trajectory), left
    assert (left.env_reward, left.end_reason, left.agent_text) == (0.0, "gave_up", "hm")


COMMAND = """
    import json, os, sys, urllib.request

    def post(url, body):
        headers = {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        }
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))

    game, model = os.environ["MANUS_JAX_ENVIRONMENT_URL"], os.environ["OPENAI_BASE_URL"]
    assert json.loads(os.environ["MANUS_JAX_TASK"])["item_id"] == "maze_3"
    result = post(game + "/reset", {})
    messages, done = [], False
    while not done:
        messages.append({"role": "user", "content": result["observation"]})
        made = post(model + "/chat/completions", {"model": "policy", "messages": messages})
        messages.append(made["choices"][0]["message"])
        result = post(game + "/step", {"action": messages[-1]["content"]})
        done = result["done"]
    print("played")
    print(json.dumps({"reward": 0.5}))
"""


def test_a_command_plays_over_http(
    tmp_path: Path, pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(textwrap.dedent(COMMAND))
    command = [sys.executable, str(agent)]
    [won] = play(engine_of(oracle_action()), pool, running(command=command))
    assert isinstance(won, Trajectory), won
    assert (won.env_reward, won.end_reason, len(won.segments)) == (1.0, "done", 1)
    [scored] = play(engine_of(oracle_action()), pool, running(command=command, reward="result"))
    assert isinstance(scored, Trajectory) and scored.env_reward == 0.5


def test_a_command_that_cannot_be_started_is_dropped_with_one_message(
    tmp_path: Path,
    pool: EnvironmentPool,
    engine_of: Callable[..., ScriptedEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = EngineAgent(engine_of(says("up")), engine_of(says("up")).tokenizer)
    long = spec_of("maze_3", extra={"hints": "x" * 2**20})  # more than a variable can have
    settings = running(command=[sys.executable, "-c", "pass"])
    with caplog.at_level(logging.WARNING):
        [failed] = run_episodes([long], agent, pool, settings)
    agent.close()
    assert isinstance(failed, FailedEpisode) and failed.kind == "program"
    assert "cannot be started: Argument list too long" in failed.error
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("result", ["[" * 10**5, '{"reward": 1' + "0" * 400 + "}", "NaN", "", "x"])
def test_a_result_without_a_reward_is_not_one(result: str) -> None:
    number = reward_of(result)
    assert number is None or not math.isfinite(number)


@pytest.mark.parametrize(
    ("name", "reward", "message", "attempts"),
    [
        ("never_calls", "result", "it must call the endpoint", 1),
        ("never_plays", "environment", "returned no reward: it did not play", 1),
        ("gives_up", "result", "returned no reward but 'None'", 1),
        ("raises", "environment", "it failed: OSError: the disk is full", 2),
        ("misspells", "result", "its newest request was refused: unknown field 'max_token'", 1),
        (
            "asks_for_many",
            "environment",
            "30 of its 30 turns left (rollout.max_turns), and the request asks for 31",
            1,
        ),
    ],
)
def test_a_program_that_fails_is_dropped_with_one_message(
    name: str,
    reward: str,
    message: str,
    attempts: int,
    pool: EnvironmentPool,
    engine_of: Callable[..., ScriptedEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        [failed] = play(engine_of(says("up")), pool, function(name, reward=reward))
    assert isinstance(failed, FailedEpisode)
    assert (failed.kind, failed.attempts) == ("program", attempts)
    assert message in failed.error
    assert [record for record in caplog.records if message in record.message]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("reward", ["environment", "result", "function"])
def test_a_first_request_that_does_not_fit_is_a_prompt_that_is_too_long(
    reward: str, pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    [failed] = play(engine_of(says("up")), pool, function("asks_too_much", reward=reward))
    assert isinstance(failed, FailedEpisode)
    assert (failed.kind, failed.attempts) == ("prompt_too_long", 1)
    assert "the messages leave 0 of 8192 tokens for a reply" in failed.error
    assert "raise rollout.max_total_tokens" in failed.error


def test_the_key_of_another_episode_is_refused(
    pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    def script(request: Request, seen: str) -> str:
        return "up"

    settings = dataclasses.replace(function("uses_the_first_key"), episode_timeout=20.0)
    engine = engine_of(script)
    agent = EngineAgent(engine, engine.tokenizer)

    def other_has_failed(index: int, outcome: Outcome) -> None:
        maze_programs.CALLS.append("done")

    specs = [spec_of("maze_3", number) for number in range(2)]
    outcomes = run_episodes(specs, agent, pool, settings, other_has_failed)
    agent.close()
    kinds = sorted(type(outcome).__name__ for outcome in outcomes)
    assert kinds == ["FailedEpisode", "Trajectory"]
    [failed] = [outcome for outcome in outcomes if isinstance(outcome, FailedEpisode)]
    assert "it uses the API key of another episode" in failed.error and failed.attempts == 1
    [kept] = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    assert len(kept.turns) == 1  # its own


def test_an_overdue_program_is_dropped_and_its_later_requests_are_refused(
    pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    engine = engine_of(says("up"))
    agent = EngineAgent(engine, engine.tokenizer)
    settings = dataclasses.replace(function("hangs"), episode_timeout=0.3)
    began = time.monotonic()
    [late] = run_episodes([spec_of("maze_3")], agent, pool, settings)
    assert time.monotonic() - began < 0.9
    assert isinstance(late, FailedEpisode) and late.kind == "overdue"
    while len(maze_programs.CALLS) < 2 and time.monotonic() - began < 20:
        time.sleep(0.05)
    assert maze_programs.CALLS == ["the episode has ended"] * 2
    assert len(engine.requests) == 1
    agent.close()


def test_a_command_that_hangs_is_killed(
    tmp_path: Path, pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    agent = tmp_path / "agent.py"
    alive = tmp_path / "alive"
    agent.write_text(f"import time\ntime.sleep(3)\nopen({str(alive)!r}, 'w')\n")
    settings = running(command=[sys.executable, str(agent)])
    settings = dataclasses.replace(settings, episode_timeout=0.5)
    began = time.monotonic()
    [late] = play(engine_of(says("up")), pool, settings)
    assert isinstance(late, FailedEpisode) and late.kind == "overdue"
    assert time.monotonic() - began < 2.5
    agent.write_text("import sys\nsys.exit('no luck')\n")
    [failed] = play(
        engine_of(says("up")), pool, dataclasses.replace(settings, episode_timeout=None)
    )
    assert isinstance(failed, FailedEpisode)
    assert "exit code 1: no luck" in failed.error and failed.attempts == 2
    assert not alive.exists()


FLOOD = """
    import os, subprocess, sys, urllib.request

    line = b"x" * 65535 + b"\\n"
    for descriptor in (1, 2):
        for _ in range(int(sys.argv[1])):
            os.write(descriptor, line)
    if sys.argv[2:]:
        # It has a session of its own, so it is not killed, and keeps the pipes.
        more = "import os, time\\nwhile True:\\n os.write(1, b'y' * 65536)"
        subprocess.Popen([sys.executable, "-c", more], start_new_session=True)
    print(b"\\xff".decode("latin-1"))
    print('{"reward": 0.5}', flush=True)
"""


@pytest.mark.parametrize("arguments", [("2000",), ("1", "and a child that goes on")])
def test_of_the_output_of_a_command_only_the_end_is_kept(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(textwrap.dedent(FLOOD))
    task = ProgramTask("", "", "", "maze", 3, "maze_3", (), None, {}, cast(Any, None))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no space left"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with running_command([sys.executable, str(agent), *arguments], task) as ended:
        printed = ended.result(timeout=60)
    assert reward_of(printed) == 0.5 or arguments[1:]
    assert len(printed) <= 2**16 and time.monotonic() - began < 30
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50_000  # KiB; it prints 250 MiB


def test_failures_of_the_engine_and_of_a_run_are_those_of_any_episode(
    pool: EnvironmentPool, engine_of: Callable[..., ScriptedEngine]
) -> None:
    engine = engine_of(oracle_action())
    whole = engine.submit
    lost = iter([True])

    def submit(request: Request) -> Any:
        if next(lost, False):
            raise EngineError("the server is down")
        return whole(request)

    engine.submit = submit
    [won] = play(engine, pool, function("plays"))
    assert isinstance(won, Trajectory) and won.attempts == 2 and won.success
    lost = iter([True])
    [scored] = play(engine, pool, function("ignores_errors", reward="result"))
    assert isinstance(scored, Trajectory) and (scored.attempts, scored.env_reward) == (2, 1.0)
    agent = EngineAgent(engine, engine.tokenizer)
    from manus_jax.rollout.strategies import RolloutContext, play_spec

    cancelled = Cancellation()
    cancelled.cancel()
    context = RolloutContext(agent, pool, function("plays"), cancelled)
    [outcome] = play_spec(spec_of("maze_3"), context)
    assert isinstance(outcome, FailedEpisode) and outcome.kind == "cancelled"
    agent.close()


def test_policies_without_an_endpoint_play_the_environment_themselves(
    pool: EnvironmentPool,
) -> None:
    [won] = run_episodes([spec_of("maze_3")], OraclePolicy(), pool, function("never_calls"))
    assert isinstance(won, Trajectory) and won.success


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "give either function"),
        ({"function": "a:b", "command": ["x"]}, "give either function"),
        ({"function": "maze_programs"}, "must have the form 'module:function'"),
        ({"function": "maze_programs:nothing"}, "has no function 'nothing'"),
        ({"function": "no_such_package:play"}, "No module named 'no_such_package'"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"command": "python agent.py"}, "must be a list of words"),
        ({"command": []}, "must be a list of words"),
        ({"command": [3]}, r"command = \[3\] must be Sequence\[str\] \| None"),
        ({"command": 3}, "command = 3 must be Sequence"),
        ({"command": {"a": 1}}, "must be Sequence"),
        ({"function": "maze_programs:plays", "reward": "luck"}, "'luck' must be one of 'env"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        check_strategy(running(**parameters))
