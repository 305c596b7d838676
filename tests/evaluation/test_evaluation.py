"""`python -m manus_jax.evaluate` as a user runs it, and its statistics."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from env_servers import AppServer
from scripted_servers import recorded, serving
from sequences import batch_of

from envs.maze.game import MazeGame
from envs.registry import load
from envs.server import build_app
from manus_jax import command, convert, evaluate, train
from manus_jax.agentgym.environments import embedded_server, open_environments
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.config.settings import RolloutSettings, ScratchSettings
from manus_jax.data.chat import ChatStream, Message
from manus_jax.data.tasks import Task
from manus_jax.evaluation.eval_sets import EvalSet, split_tasks
from manus_jax.evaluation.play import EvaluationError, evaluate_policy, summarize_by_env
from manus_jax.learner.objectives import log_probs_of
from manus_jax.learner.packing import PackedRows, RowShape, add_packing
from manus_jax.models import loading as policy_source
from manus_jax.models.huggingface import save_hf
from manus_jax.models.transformer import Compute, Transformer, abstract_model
from manus_jax.rollout.baseline_players import OraclePolicy
from manus_jax.rollout.trajectory import (
    FailedEpisode,
    Outcome,
    Trajectory,
    Turn,
    episode_specs,
    trajectories,
)
from manus_jax.rollout.trajectory_files import read_trajectories
from manus_jax.servers.processes import ServerProcess

pytestmark = pytest.mark.slow

SMALL = ScratchSettings(
    vocab_size=400, hidden_size=32, intermediate_size=64, num_layers=2, head_dim=8
)
MODEL = (
    "env.names = ['maze']",
    "evaluate.tasks_per_env = 3",
    "rollout.max_turns = 3",
    "rollout.max_tokens_per_turn = 12",
    "rollout.max_total_tokens = 1536",
    "engine.slots = 2",
)


def arguments(out_dir: Path, policies: list[str], *more: str) -> list[str]:
    params = [f"evaluate.out_dir = '{out_dir}'", f"evaluate.policies = {policies}", *more]
    return [f"--gin_param={param}" for param in params]


def played(out_dir: Path, name: str) -> list[Trajectory]:
    return trajectories(list(read_trajectories(out_dir / "trajectories" / f"{name}.jsonl")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a tiny random model."""
    folder = tmp_path_factory.mktemp("model")
    texts = [part for p in PROMPTS.values() for part in (p.instruction, *p.actions)]
    source = policy_source.from_scratch(SMALL, texts, 3, folder / "card")
    save_hf(source.load(None), source.card, folder / "hf")
    return folder / "hf"


# Numbers by hand.


def outcome(spec: Any, score: float | None, valid: tuple[bool, ...] = (True, True)) -> Outcome:
    if score is None:
        return FailedEpisode(spec, "timeout", "no answer", 2)
    turns = tuple(Turn("said", "go" if good else None, "seen", 0.0) for good in valid)
    return Trajectory(spec, (), "seen", turns, (), score, score == 1.0, "done")


def test_failures_are_counted_and_enter_no_mean() -> None:
    tasks = [Task("maze", n, f"maze_{n}") for n in range(3)] + [Task("wordle", 0, "wordle_0")]
    scores = (
        (1.0, 0.0, 0.5, 1.0),  # half of them succeed, mean 0.625
        (0.0, None, 0.0, 0.0),  # none of three
        (None, None, None, None),  # no task at all
        (1.0, 1.0, 1.0, None),  # all of three
    )
    specs = episode_specs(tasks, 4)
    flat = [score for row in scores for score in row]
    outcomes = [outcome(spec, score) for spec, score in zip(specs, flat, strict=True)]
    outcomes[0] = outcome(specs[0], 1.0, (True, False, False))

    result = summarize_by_env(outcomes, 4)
    maze = result.environments["maze"]
    assert (maze.episodes, maze.failed) == (7, {"timeout": 5})
    assert maze.success_rate is not None and maze.score is not None
    assert (maze.success_rate.value, maze.success_rate.tasks) == (0.25, 2)
    assert maze.score.value == 0.3125
    # Two of four: pass@2 is 1 - 1/6 and pass@4 is 1; none of three: 0 at 2, unknown at 4.
    assert {k: e.value for k, e in maze.pass_at.items()} == pytest.approx(
        {1: 0.25, 2: 5 / 12, 4: 1.0}
    )
    assert maze.pass_at[4].tasks == 1
    assert maze.turns == pytest.approx(15 / 7)
    assert maze.invalid_action_rate == pytest.approx(2 / 15)

    metrics = result.metrics()
    wanted = {
        "val/maze/success_rate": 0.25,
        "val/maze/score": 0.3125,
        "val/maze/test_score": 0.3125,
        "val/maze/avg@4": 0.3125,
        "val/maze/pass@2": 5 / 12,
        "val/maze/failed": 5.0,
        "val/wordle/success_rate": 1.0,
        "val/wordle/pass@2": 1.0,
        "val/success_rate": 0.5,  # of the three tasks that were played: 0.5, 0 and 1
        "val/score": (0.625 + 0 + 1) / 3,
        "val/failed": 6.0,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert "val/wordle/pass@4" not in metrics  # nobody played a task of wordle four times


def test_a_policy_that_played_nothing_has_no_numbers_but_its_failures() -> None:
    specs = episode_specs([Task("maze", 1, "maze_1")], 1)
    result = summarize_by_env([outcome(spec, None) for spec in specs], 1)
    assert result.metrics() == {"val/failed": 1.0, "val/maze/failed": 1.0}
    with pytest.raises(EvaluationError, match="x: all 1 episodes failed, the first with timeout"):
        result.check_played("x")
    assert json.loads(json.dumps(result.overall.record()))["success_rate"] is None


# The command, on real servers.


def test_the_oracle_scores_highest_and_the_random_policy_lowest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate.main(
        arguments(
            tmp_path / "out",
            ["oracle", "random"],
            "env.names = ['maze', 'textcraft']",
            "evaluate.tasks_per_env = 10",
            "evaluate.samples = 2",
            "rollout.max_turns = 30",
        )
    )
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert record["samples"] == 2 and len(record["items"]["maze"]) == 10
    oracle, random = (record["policies"][name] for name in ("oracle", "random"))
    for env in ("maze", "textcraft"):
        assert oracle["environments"][env]["success_rate"]["value"] == 1.0
        assert oracle["environments"][env]["pass@2"]["value"] == 1.0
        assert random["environments"][env]["success_rate"]["value"] <= 0.25
        assert random["environments"][env]["episodes"] == 20
    assert oracle["overall"]["success_rate"]["tasks"] == 20
    assert oracle["overall"]["failed"] == random["overall"]["failed"] == {}
    # The files say the same as the table.
    episodes = played(tmp_path / "out", "random")
    assert sum(t.success for t in episodes) / 40 == random["overall"]["success_rate"]["value"]
    shown = capsys.readouterr().out
    assert "pass@2" in shown and "oracle" in shown and "textcraft" in shown
    assert "evaluate 80/80  random success" in shown


@pytest.mark.slow
def test_best_of_n_is_evaluated_as_pass_at_n(tmp_path: Path) -> None:
    """With the environment's reward as the judge, and the same random numbers for attempt 0."""
    usual = ("env.names = ['babyai']", "evaluate.tasks_per_env = 8", "rollout.max_turns = 15")
    best = ("rollout.strategy = 'best_of_n'", "rollout.strategy_parameters = {'n': 4}")
    success = {}
    for name, more in (("once", ()), ("best", best)):
        evaluate.main(arguments(tmp_path / name, ["random"], *usual, *more))
        episodes = played(tmp_path / name, "random")
        assert len(episodes) == 8
        success[name] = {t.task.item_id for t in episodes if t.success}
    assert success["once"] < success["best"]


def test_a_strategy_of_several_episodes_is_not_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path, ["random"], "env.names = ['maze']", "rollout.strategy = 'tree'")
    monkeypatch.setattr(sys, "argv", ["evaluate", *args])
    with pytest.raises(SystemExit) as exited:
        command.run(evaluate.main)
    assert exited.value.code == 2
    assert "plays up to 2 episodes together" in capsys.readouterr().err


@pytest.mark.bug("B9")
def test_validation_in_training_is_the_same_code() -> None:
    eval_set = EvalSet(tuple(split_tasks("maze", "test", 4)))
    ended: list[int] = []
    with open_environments({"maze": "embedded"}) as pool:
        result = evaluate_policy(
            OraclePolicy(),
            pool,
            eval_set,
            RolloutSettings(max_turns=50),
            lambda index, outcome: ended.append(index),
        )
    assert sorted(ended) == [0, 1, 2, 3]
    assert [o.spec for o in result.outcomes] == eval_set.specs()
    metrics = result.metrics("val")
    assert metrics["val/maze/success_rate"] == metrics["val/success_rate"] == 1.0
    assert metrics["val/failed"] == 0.0 and metrics["val/maze/turns"] > 1


def test_a_model_plays_and_its_tokens_and_log_probs_are_exact(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate.main(arguments(out, [str(model)], *MODEL, "evaluate.samples = 2"))
    [name] = [path.stem for path in (out / "trajectories").iterdir()]
    episodes = played(out, name)
    assert len(episodes) == 6 and all(len(t.turns) == 3 for t in episodes)
    assert len({t.turns[0].text for t in episodes}) > 1

    source = policy_source.from_path(model)
    stream = ChatStream(source.tokenizer)
    samples = []
    for episode in episodes:
        # The stream is the opening, then in turns what was sampled and what the template adds.
        [segment] = episode.segments
        ids = stream.start(episode.opening)
        mask = [False] * len(ids)
        for number, turn in enumerate(episode.turns):
            sampled = segment.token_ids[turn.start : turn.stop].tolist()
            assert turn.start == len(ids) and 0 < len(sampled) <= 12
            assert turn.cut == (sampled[-1] not in (stream.stop_id, source.tokenizer.eos_token_id))
            ids += sampled
            mask += [True] * len(sampled)
            if number + 1 < len(episode.turns):
                reply = stream.extend(sampled, [Message("user", turn.observation)])
                ids += reply
                mask += [False] * len(reply)
        assert segment.token_ids.tolist() == ids and segment.loss_mask.tolist() == mask
        log_probs = segment.log_probs[segment.loss_mask]
        assert np.isfinite(log_probs).all() and (log_probs <= 0).all()
        samples.append({"input_ids": segment.token_ids, "loss_mask": segment.loss_mask})

    packed = PackedRows(add_packing(batch_of(samples), 1536), RowShape(len(samples), 1536), 1)
    graphdef, _ = abstract_model(Transformer, source.card.architecture, Compute())
    batch = {name: array[0] for name, array in packed.arrays(()).items()}
    learned, _ = jax.jit(lambda params, batch: log_probs_of(graphdef, params, batch))(
        source.load(None), batch
    )
    for episode, again in zip(episodes, packed.unpack(np.asarray(learned)[None]), strict=True):
        [segment] = episode.segments
        np.testing.assert_allclose(segment.log_probs, again[: len(segment)], atol=1e-4)


def test_greedy_evaluation_twice_is_the_same_to_the_token(model: Path, tmp_path: Path) -> None:
    """Once from the Hugging Face directory, once from a checkpoint of it, as one command."""
    run, out = tmp_path / "run", tmp_path / "out"
    convert.main(["from-hf", "--hf", str(model), "--out", str(run)])
    policies = [str(model), str(run)]
    evaluate.main(arguments(out, policies, *MODEL, "rollout.temperature = 0"))
    record = json.loads((out / "evaluation.json").read_text())["policies"]
    assert list(record) == policies
    first, second = (
        [t.segments[0].token_ids.tolist() for t in trajectories(list(read_trajectories(path)))]
        for path in (out / record[policy]["trajectories"] for policy in policies)
    )
    assert len(first) == 3 and first == second


def test_servers_that_run_elsewhere_are_played_over_agentgyms_items(tmp_path: Path) -> None:
    server = ServerProcess(embedded_server("maze"))
    try:
        while server.url is None:
            assert server.exit_status is None, server.tail
            time.sleep(0.05)
        params = ("env.names = ['maze']", f"env.urls = {{'maze': ['{server.url}']}}")
        evaluate.main(arguments(tmp_path, ["oracle"], *params, "evaluate.tasks_per_env = 4"))
    finally:
        server.kill()
        server.wait(5)
    record = json.loads((tmp_path / "evaluation.json").read_text())
    assert len(record["items"]["maze"]) == 4 and max(record["items"]["maze"]) < 25
    assert record["policies"]["oracle"]["overall"]["success_rate"]["value"] == 1.0


# Mistakes.


def error_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["evaluate", *args])
    with pytest.raises(SystemExit) as stopped:
        command.run(evaluate.main)
    assert stopped.value.code == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("error: ") and "\n" not in text
    return text


def test_mistakes_end_in_one_line_before_anything_is_played(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"

    def error(*more: str, policies: tuple[str, ...] = ("oracle",), envs: str = "['maze']") -> str:
        params = arguments(out, list(policies), f"env.names = {envs}", *more)
        return error_of(capsys, monkeypatch, *params)

    assert "unknown setting evaluate.sample; did you mean 'samples'" in error("evaluate.sample = 2")
    assert "evaluate.samples = 0 must be at least 1" in error("evaluate.samples = 0")
    text = error("train.seed = 2")
    assert "train.seed is set, but evaluate does not read it; it is read by train" in text
    assert "evaluate.policies is required" in error(policies=())
    assert "names 'oracle' twice" in error(policies=("oracle", "oracle"))
    text = error(policies=("oracle", "nowhere"))
    assert "'nowhere' is neither 'oracle' nor 'random' nor an existing directory" in text
    assert "env.names is required" in error(envs="[]")
    assert "unknown environment 'chess' (known: " in error(envs="['chess']")
    text = error(envs="['movie']")
    assert "movie has no embedded server" in text and "choose from alfworld, babyai" in text
    assert "movie has no oracle" in error(
        "env.urls = {'movie': ['http://127.0.0.1:1']}", envs="['movie']"
    )
    assert "127.0.0.1:1" in error(
        "env.urls = {'movie': ['http://127.0.0.1:1']}",
        envs="['movie']",
        policies=("random",),
    )
    with serving(recorded("maze")) as url:
        text = error(f"env.urls = {{'maze': ['{url}']}}")
    assert f"evaluate.policies has 'oracle': the server {url} has other items of maze" in text
    assert "env.urls = {'maze': 5} is not a dict" in error("env.urls = {'maze': 5}")
    assert "unknown user, '~no_one'" in error("evaluate.out_dir = '~no_one/out'")
    assert "unknown user, '~no_one'" in error(policies=("~no_one/model",))
    assert "unknown action format 'xml'" in error("rollout.action_format = 'xml'")
    assert "rollout.top_p = 0.0 must be at least 1e-06" in error("rollout.top_p = 0.0")
    assert "max_turns = 0" in error("rollout.max_turns = 0")
    assert "dataset file none.json does not exist" in error("evaluate.task_files = ['none.json']")
    greedy = error(
        "evaluate.samples = 4", "rollout.temperature = 0.0", policies=("oracle", str(model))
    )
    assert "greedy episodes of a task are identical" in greedy
    text = error("rollout.max_total_tokens = 40000", policies=(str(model),))
    assert "rollout.max_total_tokens = 40000 exceeds the 32768 positions" in text
    text = error("engine.cache_tokens = 5", policies=("oracle", str(model)))
    assert "engine.cache_tokens = 5 cannot hold one stream" in text
    vllm = ("engine.name = 'vllm'", "vllm.servers = 1", "vllm.python = '/nowhere/python'")
    assert "/nowhere/python is not an interpreter" in error(*vllm, policies=(str(model),))
    run = tmp_path / "run"
    convert.main(["from-hf", "--hf", str(model), "--out", str(run)])
    stored = max((run / "checkpoints" / "0").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(stored.read_bytes())
    content[len(content) // 2] ^= 1
    stored.write_bytes(content)
    assert "is damaged" in error(policies=("oracle", str(run)))
    (tmp_path / "file").write_text("")
    params = arguments(tmp_path / "file", ["oracle"], "env.names = ['maze']")
    assert "evaluate.out_dir" in error_of(capsys, monkeypatch, *params)
    assert not (out / "evaluation.json").exists()


def test_a_policy_that_cannot_play_a_single_episode_is_an_error(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = [p for p in MODEL if "max_total_tokens" not in p] + ["rollout.max_total_tokens = 64"]
    text = error_of(capsys, monkeypatch, *arguments(tmp_path / "out", [str(model)], *short))
    assert "all 3 episodes failed, the first with prompt_too_long" in text
    assert not caplog.records  # the error says it
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    [policy] = record["policies"].values()
    assert policy["overall"]["failed"] == {"prompt_too_long": 3}


def test_a_validation_that_cannot_play_a_single_episode_ends_a_training_run(
    model: Path, tmp_path: Path
) -> None:
    class Broken(MazeGame):
        def reset(self, item: int) -> str:
            raise RuntimeError("a bug")

    server = AppServer()
    url = server(build_app(dataclasses.replace(load("maze"), new_game=Broken)))
    for split, items in (("train", ["maze_3"]), ("val", ["maze_1", "maze_2"])):
        (tmp_path / f"{split}.json").write_text(json.dumps(items))
    params = [
        f"train.run_dir = '{tmp_path / 'run'}'",
        "train.val_only = True",
        "train.batch_size = 2",
        f"model.path = '{model}'",
        f"env.urls = {{'maze': ['{url}']}}",
        *(f"data.{split}_files = ['{tmp_path / split}.json']" for split in ("train", "val")),
        "data.max_length = 1536",
        "data.rows = 8",
        "env_pool.attempts = 1",
        "env_pool.first_retry = 0.01",
        "env_pool.longest_retry = 0.01",
        *(p for p in MODEL if not p.startswith("evaluate.")),
        "engine.slots = 8",  # at least one for each of the eight devices
    ]
    with pytest.raises(EvaluationError, match="validation at step 0: all 2 episodes failed"):
        train.main([f"--gin_param={param}" for param in params])
    server.stop()
    assert len(list(read_trajectories(tmp_path / "run" / "trajectories" / "val_0.jsonl"))) == 2
    assert not (tmp_path / "run" / "export").exists()


def test_the_directory_of_a_run_is_no_place_for_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "4").mkdir(parents=True)
    (run / "config.gin").write_text("train.seed = 1\n")
    params = ("env.names = ['maze']", "evaluate.tasks_per_env = 1")
    for out_dir in (run, run / "checkpoints", run / "export" / "4", run / "trajectories"):
        text = error_of(capsys, monkeypatch, *arguments(out_dir, ["oracle"], *params))
        assert f"evaluate.out_dir {out_dir} belongs to the run {run}" in text
    assert (run / "config.gin").read_text() == "train.seed = 1\n"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.gin"]
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.gin").write_text("evaluate.samples = 2\n")
    text = error_of(capsys, monkeypatch, *arguments(own, ["oracle"], *params))
    assert "contains a config.gin that is not from an evaluation" in text
    for _ in range(2):  # an evaluation may be repeated, also next to the files of a run
        evaluate.main(arguments(run / "evaluation", ["oracle"], *params))
    assert (run / "evaluation" / "config.gin").is_file()


def test_a_model_without_a_chat_template_is_refused(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = policy_source.from_path(model)
    bare = tmp_path / "bare"
    save_hf(source.load(None), source.card, bare)
    (bare / "chat_template.jinja").unlink()
    (bare / "SHA256SUMS").unlink()
    params = arguments(tmp_path / "out", [str(bare)], *MODEL)
    assert "has no chat template" in error_of(capsys, monkeypatch, *params)
