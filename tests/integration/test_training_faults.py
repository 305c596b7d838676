"""Failures in a training run: one line that explains them, and no saved data is lost."""

import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from scripted_servers import recorded, serving
from test_training import ROOT, arguments, error_of, metrics

from envs import registry
from envs.server import build_app
from manus_jax import train
from manus_jax.algorithms.recipes import POLICY_LOSSES, RECIPES, Recipe
from manus_jax.rewards import REWARDS


def start(run_dir: Path, *more: str, **how) -> subprocess.Popen:
    run = [sys.executable, "-m", "manus_jax.train", *arguments(run_dir, *more)]
    return subprocess.Popen(
        run, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    )


def test_a_run_that_is_interrupted_finishes_its_step_and_resumes_later(tmp_path):
    process = start(tmp_path, "train.total_steps = 50", "train.save_freq = 50")
    while process.poll() is None and not (tmp_path / "trajectories" / "1.jsonl").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    done = metrics(tmp_path)[-1]["step"]
    assert f"stopped after step {done} of 50, which is saved" in errors
    assert "Traceback" not in errors
    train.main(arguments(tmp_path, f"train.total_steps = {done + 1}"))
    assert [line["step"] for line in metrics(tmp_path)] == list(range(done + 2))


def test_a_full_disk_is_one_line_and_leaves_no_half_file(tmp_path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    process = start(tmp_path / "run", "train.total_steps = 2", preexec_fn=small_files)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "cannot be written any more" in errors and "File too large" in errors
    train.main(arguments(tmp_path / "run", "train.total_steps = 1"))
    assert metrics(tmp_path / "run")[-1]["step"] == 1


def test_a_run_directory_that_cannot_be_made_or_is_anothers(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error_of(capsys, monkeypatch, *arguments(tmp_path / "file/run"))
    train.main(arguments(tmp_path / "run", "train.total_steps = 1"))
    capsys.readouterr()
    other = arguments(tmp_path / "run", "train.total_steps = 1", "train.group_size = 2")
    text = error_of(capsys, monkeypatch, *other)
    assert "holds a run with other settings: train.group_size was 4 and is 2" in text


def test_a_run_continues_although_files_of_its_warm_start_are_damaged(tmp_path, capsys):
    train.main(arguments(tmp_path, "train.total_steps = 1"))
    model = tmp_path / "warm_start/export/2/model.safetensors"
    traces, whole = tmp_path / "warm_start/traces.jsonl", model.read_bytes()
    conversations = traces.read_bytes()
    traces.write_bytes(conversations[:100])  # they are not needed any more
    train.main(arguments(tmp_path, "train.total_steps = 2"))
    traces.write_bytes(conversations)
    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    capsys.readouterr()
    train.main(arguments(tmp_path, "train.total_steps = 3"))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{model} does not match SHA256SUMS; the warm start's model is made again" in printed
    assert model.read_bytes() == whole
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1, 2, 3]


def test_gradients_that_are_never_finite_end_the_run(tmp_path, capsys, monkeypatch):
    recipe = "algorithm.recipe = 'nan_for_tests'"
    more = ("train.total_steps = 9", recipe, "train.max_bad_updates = 2")
    with POLICY_LOSSES.restored(), RECIPES.restored():
        POLICY_LOSSES.register("nan_for_tests")(lambda recipe, t: (t.log_probs * np.nan, {}))
        RECIPES.add(Recipe("nan_for_tests", "grpo", loss="nan_for_tests"))
        text = error_of(capsys, monkeypatch, *arguments(tmp_path, *more))
    assert "2 updates of the policy in a row were not finite" in text
    assert not (tmp_path / "export").exists()


@REWARDS.register("raises_for_tests")
def raises(solution_str, ground_truth, **kwargs):
    raise KeyError("answer")


@REWARDS.register("nan_for_tests")
def nan(solution_str, ground_truth, **kwargs):
    return float("nan")


@pytest.mark.parametrize("name", ["raises_for_tests", "nan_for_tests"])
def test_a_reward_function_that_fails_is_named(tmp_path, capsys, monkeypatch, name):
    more = (f"algorithm.reward = '{name}'", "algorithm.reward_parameters = {}")
    assert name in error_of(capsys, monkeypatch, *arguments(tmp_path, *more))


@REWARDS.register("constant_for_tests")
def constant(solution_str, ground_truth, **kwargs):
    return 0.5


def test_an_asynchronous_run_without_a_learning_signal_ends_instead_of_waiting(
    tmp_path, capsys, monkeypatch
):
    # A step without groups still publishes a version, or no more groups would be admitted.
    more = (
        "algorithm.reward = 'constant_for_tests'",
        "algorithm.reward_parameters = {}",
        "algorithm.recipe = 'dapo'",
        "train.max_staleness = 1",
        "algorithm.max_gen_batches = 1",
        "train.max_bad_updates = 3",
        "train.total_steps = 9",
    )
    text = error_of(capsys, monkeypatch, *arguments(tmp_path, *more))
    assert "3 steps in a row had nothing to train on: every group was dropped" in text
    assert not (tmp_path / "export").exists()


def test_tasks_without_the_ground_truth_of_a_reward_are_refused_before_anything_starts(
    tmp_path, capsys, monkeypatch
):
    more = ("algorithm.reward = 'exact_match'", "algorithm.reward_parameters = {}")
    text = error_of(capsys, monkeypatch, *arguments(tmp_path / "run", *more))
    assert "'exact_match' failed on episode maze_" in text
    assert "the ground truth must be one or more answers, got None" in text
    assert not (tmp_path / "run").exists()


@pytest.fixture
def half_broken_maze():
    """The maze's own server, which answers 500 for every second maze."""
    app: FastAPI = build_app(registry.load("maze"))

    @app.middleware("http")
    async def break_half(request: Request, call_next):
        if request.url.path.endswith("/reset") and (await request.json()).get("game", 0) % 2:
            return PlainTextResponse("broken", status_code=500)
        return await call_next(request)

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_servers_whose_items_are_others_are_refused_before_anything_is_written(
    tmp_path, capsys, monkeypatch
):
    with serving(recorded("maze")) as url:
        more = (f"env.urls = {{'maze': ['{url}']}}", "data.train_files = []", "data.val_files = []")
        text = error_of(capsys, monkeypatch, *arguments(tmp_path / "run", *more))
    assert f"data.train_files is empty: the server {url} has other items of maze" in text
    assert not (tmp_path / "run").exists()


def test_failures_of_half_of_the_episodes_are_reported_and_the_others_are_trained_on(
    tmp_path, capsys, half_broken_maze
):
    more = (
        f"env.urls = {{'maze': ['{half_broken_maze}']}}",
        "train.total_steps = 2",
        "train.val_before_train = False",
        "data.val_files = []",
    )
    warm = tmp_path / "warm"
    train.main(arguments(warm, "train.total_steps = 1"))
    capsys.readouterr()
    model = f"model.path = '{warm / 'warm_start' / 'export' / '2'}'"
    given = [
        a
        for a in arguments(tmp_path / "run", *more, model, "warm_start.steps = 0")
        if "scratch" not in a
    ]
    train.main(given)
    told = capsys.readouterr().out
    lines = metrics(tmp_path / "run")
    assert any(line["rollout/failed"] > 0 for line in lines)
    assert sum(line["rollout/episodes"] for line in lines) > 0
    assert "episodes were dropped" in told
    assert [line["step"] for line in lines] == [1, 2]
