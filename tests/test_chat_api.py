"""Models behind OpenAI's chat API: the client, and their use as policies and judges."""

import itertools
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from chat_servers import chatting
from scripted_servers import HangUp, Reply, serving

from manus_jax.agentgym.environments import open_environments
from manus_jax.config.settings import RolloutSettings
from manus_jax.errors import UserError
from manus_jax.evaluate import main as evaluate
from manus_jax.evaluation.eval_sets import EvalSet, split_tasks
from manus_jax.evaluation.play import evaluate_policy
from manus_jax.rewards import RewardError, RewardSettings, RewardUnavailable, compute
from manus_jax.rollout.api_player import ApiPolicy
from manus_jax.rollout.scoring import score_outcome
from manus_jax.rollout.traces import TraceError
from manus_jax.rollout.trajectory import FailedEpisode, trajectories
from manus_jax.servers import chat_api
from manus_jax.servers.chat_api import ChatApi, ChatApiError
from manus_jax.servers.health import BackOff
from manus_jax.traces import main as traces
from manus_jax.train import main as train

HELLO = [{"role": "user", "content": "hello"}]
SOON = BackOff(first=0.001)


def api(url: str) -> ChatApi:
    return ChatApi("m", url, timeout=5.0, back_off=SOON)


def test_a_request_is_openais_and_its_options_reach_the_server(monkeypatch) -> None:
    seen: list = []
    with chatting(lambda messages: "two words", seen) as url:
        completion = api(url).complete(HELLO, temperature=0.5, max_tokens=7)
        cut = api(url).complete(HELLO, max_tokens=1)
    assert (completion.text, completion.cut, cut.cut) == ("two words", False, True)
    assert seen[0] == {"model": "m", "messages": HELLO, "temperature": 0.5, "max_tokens": 7}


@pytest.mark.parametrize("failure", [Reply("busy", 429), Reply("oops", 500), HangUp()])
def test_passing_failures_are_tried_again(failure) -> None:
    replies = iter([failure, failure, "fine"])

    def reply(messages):
        answer = next(replies)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with chatting(reply) as url:
        assert api(url).complete(HELLO).text == "fine"


def test_a_lone_surrogate_in_a_completion_is_replaced() -> None:
    with chatting(lambda messages: "left \ud800 right") as url:
        assert api(url).complete(HELLO).text == "left ? right"


def test_lasting_failures_are_one_error_that_names_the_server() -> None:
    replies = {
        Reply("down", 503): r"m at http://127\.0\.0\.1:\d+/v1: status 503: down",
        Reply('{"error": "no such model"}', 404): r"status 404: .*no such model",
    }
    for text in ("{}", "[]", '{"choices": [{"message": {"content": null}}]}', "<html>"):
        replies[Reply(text)] = "gave no chat completion"
    for reply, message in replies.items():
        with (
            chatting(lambda messages, reply=reply: reply) as url,
            pytest.raises(ChatApiError, match=message),
        ):
            api(url).complete(HELLO)


@pytest.mark.parametrize(
    "text",
    ["m", "@http://h/v1", "m@", "m@ftp://h", "m@host:8000", "m@http://", "m@http://a..b/v1"],
)
def test_invalid_model_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be MODEL@URL"):
        ChatApi.parse(text)
    with pytest.raises(
        ValueError, match=r"'m' must be MODEL@URL, such as MODEL@http://HOST:PORT/v1$"
    ):
        ChatApi.parse("m")
    assert ChatApi.parse("a@b@http://h:1/v1/") == ChatApi("a@b", "http://h:1/v1")


@pytest.mark.parametrize("key", ["a\nb", "\u20ac"])
def test_a_key_that_cannot_be_sent_is_an_error_at_once_that_does_not_show_it(
    key: str, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    (tmp_path / "rubric").write_text("Be good.")
    address = "m@http://127.0.0.1:9/v1"
    policy = ApiPolicy(ChatApi.parse(address))
    parameters = {"model": address, "rubric": str(tmp_path / "rubric")}
    for use in (
        lambda: api("http://127.0.0.1:9/v1").complete(HELLO),
        lambda: policy.check("maze", RolloutSettings()),
        lambda: RewardSettings("judge", parameters),
    ):
        with pytest.raises(UserError, match="OPENAI_API_KEY cannot be sent") as caught:
            use()
        assert key not in str(caught.value)


def follow_the_compass(messages: list[dict[str, str]]) -> str:
    """Plays maze by the positions in the last observation, straight towards the goal."""
    numbers = [int(n) for n in re.findall(r"position (\d+), (\d+)", messages[-1]["content"])[-1]]
    goal = [
        int(n) for n in re.findall(r"goal is at position (\d+), (\d+)", messages[-1]["content"])[-1]
    ]
    walls = messages[-1]["content"].rpartition("There")[2]
    moves = [
        ("move up", "above", goal[0] < numbers[0]),
        ("move down", "below", goal[0] > numbers[0]),
        ("move left", "to your left", goal[1] < numbers[1]),
        ("move right", "to your right", goal[1] > numbers[1]),
    ]
    open_moves = [move for move, wall, wanted in moves if wall not in walls]
    best = [move for move, wall, wanted in moves if wanted and wall not in walls]
    return f"Thought:\nI walk.\n\nAction:\n{(best or open_moves)[0]}"


def test_a_chat_api_plays_episodes_with_the_same_prompts_and_parsers() -> None:
    seen: list = []
    settings = RolloutSettings(max_turns=30, max_in_flight=4)
    with chatting(follow_the_compass, seen) as url, open_environments({"maze": "embedded"}) as pool:
        eval_set = EvalSet(tuple(split_tasks("maze", "test", 8)))
        result = evaluate_policy(ApiPolicy(api(url)), pool, eval_set, settings)
    episodes = trajectories(result.outcomes)
    assert len(episodes) == 8 and any(e.success for e in episodes)
    assert all(turn.action is not None for e in episodes for turn in e.turns)
    assert all(body["max_tokens"] == settings.max_tokens_per_turn for body in seen)
    roles = [message["role"] for message in seen[-1]["messages"]]
    assert roles[-1] == "user" and "assistant" in roles
    assert len({body["seed"] for body in seen}) == len(seen)


def test_an_api_that_is_down_fails_episodes_and_scores_none() -> None:
    settings = RolloutSettings(max_turns=3, max_in_flight=2)
    with open_environments({"maze": "embedded"}) as pool:
        eval_set = EvalSet(tuple(split_tasks("maze", "test", 2)))
        dead = ChatApi("m", "http://127.0.0.1:1/v1", back_off=SOON)
        result = evaluate_policy(ApiPolicy(dead), pool, eval_set, settings)
    assert [o.kind for o in result.outcomes if isinstance(o, FailedEpisode)] == ["engine"] * 2


def test_traces_of_a_chat_api_are_its_best_attempts(tmp_path, capsys) -> None:
    file = tmp_path / "t.parquet"
    with chatting(follow_the_compass) as url:
        policy = f"openai:m@{url}"
        flags = ["maze", "--n", "3", "--out", str(file), "--policy", policy, "--attempts", "2"]
        traces(flags)
    rows = pq.read_table(file).to_pylist()
    trained = [[m["value"] for m in row["conversations"] if m["loss"]] for row in rows]
    assert len(rows) == 3 and all("I walk." in text for texts in trained for text in texts)


def test_traces_leave_out_an_episode_that_the_api_refuses(tmp_path, caplog) -> None:
    file = tmp_path / "t.parquet"
    refused: list[str] = []

    def reply(messages):
        first = messages[2]["content"]  # the first two are an example
        if not refused:
            refused.append(first)
        return Reply("content filter", 400) if first in refused else follow_the_compass(messages)

    with chatting(reply) as url:
        flags = ["maze", "--n", "3", "--out", str(file), "--policy", f"openai:m@{url}"]
        traces([*flags, "--min_reward", "-1"])
    assert len(pq.read_table(file)) == 3
    [line] = [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]
    assert "content filter" in line
    with (
        chatting(lambda messages: Reply("no", 400)) as url,
        pytest.raises(TraceError, match=r"maze_\d+ failed: .*status 400: no"),
    ):
        traces([*flags[:-1], f"openai:m@{url}"])


TURNS = [
    SimpleNamespace(text="I look.", observation="A room.", action="look", valid=True, reward=0)
]


def judged(url: str, rubric, **parameters) -> float:
    settings = RewardSettings("judge", {"model": f"m@{url}", "rubric": str(rubric), **parameters})
    facts = {"env": "maze", "success": False, "finish_reason": "done", "extra": {}}
    facts["first_observation"] = "Find the door."
    return compute(
        settings, "1", "I look.", None, TURNS, env_reward=0.5, item_id="maze_1", **facts
    ).total


@pytest.fixture
def rubric(tmp_path):
    path = tmp_path / "rubric.txt"
    path.write_text("Did the agent look?")
    return path


def test_a_judge_reads_the_rubric_and_the_episode_and_is_asked_once(rubric) -> None:
    seen: list = []
    with chatting(lambda messages: "It did. Score: 3\n**Score:** 8", seen) as url:
        assert judged(url, rubric) == 0.8
        assert judged(url, rubric, env_weight=0.2) == pytest.approx(0.9)
        assert judged(url, rubric, scale=20.0) == 0.4
    assert len(seen) == 2  # the second call had the same content as the first
    prompt = seen[0]["messages"][0]["content"]
    assert "Did the agent look?" in prompt
    assert "Find the door.\n\nAgent:\nI look.\n\nEnvironment:\nA room." in prompt


def test_equal_episodes_that_are_scored_at_the_same_time_are_judged_once(rubric) -> None:
    seen: list = []
    points = itertools.count(1)

    def slowly(messages):
        time.sleep(0.3)
        return f"Score: {next(points)}"

    with chatting(slowly, seen) as url, ThreadPoolExecutor(4) as threads:
        scores = [threads.submit(judged, url, rubric) for _ in range(4)]
        assert [score.result() for score in scores] == [0.1] * 4
    assert len(seen) == 1


def test_an_episode_that_no_judge_scores_is_dropped_and_not_scored_zero(rubric) -> None:
    answers = iter(["I cannot say.", "Score: 5"])
    with chatting(lambda messages: next(answers)) as url:
        assert judged(url, rubric) == 0.5  # asked again
    for reply in ("no idea", "Score: 11", Reply("no", 404)):
        with (
            chatting(lambda messages, reply=reply: reply) as url,
            pytest.raises(RewardUnavailable, match="the judge"),
        ):
            judged(url, rubric)


def test_a_judge_that_cannot_work_is_refused_before_any_episode(rubric, tmp_path) -> None:
    (tmp_path / "blank").write_text(" \n")
    os.mkfifo(tmp_path / "pipe")
    for wrong in (
        {"rubric": str(tmp_path / "blank")},
        {"rubric": str(tmp_path / "pipe")},
        {"rubric": "/dev/zero"},
        {"max_tokens": 0},
        {"max_tokens": 10**9},
    ):
        with pytest.raises(RewardError, match="reward function 'judge'"):
            RewardSettings("judge", {"model": "m@http://h/v1", "rubric": str(rubric)} | wrong)
    for parameters, message in (
        ({"model": "m", "rubric": str(rubric)}, "must be MODEL@URL"),
        ({"model": "m@http://h/v1", "rubric": str(tmp_path / "no")}, "rubric cannot be read"),
        ({"model": "m@http://h/v1", "rubric": str(rubric), "scale": 0.0}, "must be above 0"),
        ({"rubric": str(rubric)}, "needs the parameter 'model'"),
    ):
        with pytest.raises(RewardError, match=message):
            RewardSettings("judge", parameters)


def test_unavailable_scores_always_drop_the_episode(rubric) -> None:
    settings = RolloutSettings(max_turns=2, max_in_flight=1)
    with chatting(follow_the_compass) as url, open_environments({"maze": "embedded"}) as pool:
        eval_set = EvalSet(tuple(split_tasks("maze", "test", 1)))
        [played] = evaluate_policy(ApiPolicy(api(url)), pool, eval_set, settings).outcomes
    with chatting(lambda messages: "no idea") as url:
        reward = RewardSettings("judge", {"model": f"m@{url}", "rubric": str(rubric)})
        outcome = score_outcome(played, reward, "raise")
    assert isinstance(outcome, FailedEpisode) and outcome.kind == "reward"


NO_SERVER = "http://127.0.0.1:9/v1"


def settings_of(command, use: str, policy: str) -> dict[str, object]:
    """The settings of a command that asks the model, as policy or judge."""
    parameters = {"model": policy.removeprefix("openai:"), "rubric": "rubric.txt"}
    parts = {"weights": {"env": 1.0, "judge": 1.0}, "parameters": {"judge": parameters}}
    settings: dict[str, object] = {"env.names": ["maze"]}
    if command is evaluate:
        settings |= {"evaluate.out_dir": "out", "evaluate.policies": ["oracle"]}
    else:
        settings |= {"train.run_dir": "out", "warm_start.steps": 1}
        settings |= {"rollout.max_total_tokens": 512, "data.max_length": 512, "data.rows": 8}
    more = {
        "policy": {"evaluate.policies": ["oracle", policy]},
        "best attempt": {
            "rollout.strategy": "best_of_n",
            "rollout.strategy_parameters": {"select": "judge", "select_parameters": parameters},
        },
        "reward": {"algorithm.reward": "judge", "algorithm.reward_parameters": parameters},
        "part": {"algorithm.reward": "weighted", "algorithm.reward_parameters": parts},
    }
    return settings | more[use]


@pytest.mark.parametrize(
    ("command", "use"),
    [
        *((evaluate, use) for use in ("policy", "best attempt")),
        *((train, use) for use in ("reward", "part", "best attempt")),
        (traces, "policy"),
    ],
    ids=lambda value: getattr(value, "__module__", value),
)
def test_a_server_that_does_not_answer_is_named_before_any_work(
    command, use: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubric.txt").write_text("Did the agent look?")
    monkeypatch.setattr(chat_api.time, "sleep", lambda seconds: None)
    answers = {
        Reply('{"error": "no such key"}', 401): "status 401: .*no such key",
        Reply('{"error": "no model m"}', 404): "status 404: .*no model m",
        Reply("{}"): "gave no chat completion",
    }
    for answer, message in answers.items():
        with serving(lambda method, path, body, answer=answer: answer) as url:
            refused_at_once(command, use, f"openai:m@{url}/v1", message)
    refused_at_once(command, use, f"openai:m@{NO_SERVER}", "m at .*: .*Connection refused")


def refused_at_once(command, use: str, policy: str, message: str) -> None:
    if command is traces:
        arguments = ["maze", "--n", "1", "--out", "out.parquet", "--policy", policy]
    else:
        settings = settings_of(command, use, policy)
        arguments = [f"--gin_param={name} = {value!r}" for name, value in settings.items()]
    with pytest.raises(UserError, match=message) as refused:
        command(arguments)
    assert "\n" not in str(refused.value)
    assert [path.name for path in Path.cwd().iterdir()] == ["rubric.txt"]
