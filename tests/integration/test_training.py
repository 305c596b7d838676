"""`python -m manus_jax.train` with a real environment server: runs, resumes, error messages."""

import gzip
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from manus_jax import command, train
from manus_jax.reporting.diagnoses import Diagnostician
from manus_jax.reporting.page import report_data
from manus_jax.rollout.recorded import RecordedError
from manus_jax.rollout.trajectory import Trajectory
from manus_jax.rollout.trajectory_files import read_trajectories

ROOT = Path(__file__).parents[2]
SMALL = (
    "env.names = ['maze']",
    "train.batch_size = 2",
    "train.group_size = 4",
    "train.val_tasks = 4",
    "train.test_freq = 3",
    "train.save_freq = 1",
    "rollout.max_turns = 3",
    "rollout.max_tokens_per_turn = 12",
    "rollout.max_total_tokens = 512",
    "engine.slots = 8",
    "mesh.fsdp = 1",
    "mesh.data = -1",
    "data.max_length = 512",
    "data.rows = 8",
    "warm_start.steps = 2",
    "warm_start.traces = 4",
    "warm_start.batch_size = 4",
    "scratch.vocab_size = 600",
    "scratch.hidden_size = 16",
    "scratch.intermediate_size = 32",
    "scratch.num_layers = 1",
    "scratch.num_heads = 2",
    "scratch.head_dim = 8",
    "algorithm.reward = 'length_penalty'",
    "algorithm.reward_parameters = {'min_length': 400}",
    "optimizer.lr = 0.01",
)


def arguments(run_dir, *more):
    given = any(binding.startswith("model.path") for binding in more)
    small = [binding for binding in SMALL if not (given and binding.startswith("scratch"))]
    return [f"--gin_param={p}" for p in (*small, f"train.run_dir = '{run_dir}'", *more)]


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_clock(lines):
    """Without times, and without what engine and pool count since the process started."""
    own = ("second", "timing", "engine/", "env_pool/", "perf/")
    return [{k: v for k, v in line.items() if not any(o in k for o in own)} for line in lines]


@pytest.mark.bug("B34")
def test_a_run_that_is_killed_again_and_again_ends_to_the_bit_where_an_untouched_one_does(tmp_path):
    more = ("train.total_steps = 5", "algorithm.recipe = 'grpo'", "train.save_freq = 2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def start(run_dir):
        run = [sys.executable, "-m", "manus_jax.train", *arguments(run_dir, *more)]
        log = run_dir.with_suffix(".log")
        with log.open("a") as file:
            return subprocess.Popen(run, cwd=ROOT, stdout=file)

    assert start(whole).wait() == 0
    # In the warm start, in a rollout or an update, around a save, near the end; when exactly is
    # chance, which must not matter.
    for sign in ("warm_start", "trajectories/1.jsonl", "checkpoints/2", "trajectories/4.jsonl"):
        process = start(killed)
        while process.poll() is None and not (killed / sign).exists():
            time.sleep(0.005)
        time.sleep(random.random() * 0.2)
        process.kill()
        process.wait()
    assert start(killed).wait() == 0

    lines = metrics(whole)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert without_clock(metrics(killed)) == without_clock(lines)
    for step in range(1, 6):
        ours, theirs = (
            [e.segments[0] for e in read_trajectories(d / "trajectories" / f"{step}.jsonl")]
            for d in (whole, killed)
        )
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_array_equal(a.log_probs, b.log_probs)
    exports = [(d / "export" / "5" / "model.safetensors").read_bytes() for d in (whole, killed)]
    assert exports[0] == exports[1]

    # All episodes end at the turn limit, which is reported once in the console and in the report.
    findings = Diagnostician(lines).findings
    printed = " ".join((tmp_path / "whole.log").read_text().split())
    assert any("all end at the same limit" in finding.text for finding in findings)
    assert [printed.count(f"step {f.step}: {f.text}") for f in findings] == [1] * len(findings)
    assert [f["text"] for f in report_data(whole)["findings"]] == [f.text for f in findings]

    # What was logged is what was trained on: exact tokens, and a mismatch of rounding size.
    assert all(line["mismatch/log_prob_diff_mean"] < 1e-4 for line in lines[1:])
    assert {"critic/score/mean", "actor/pg_loss", "actor/grad_norm", "val/maze/success_rate"} <= {
        key for line in lines for key in line
    }
    phases = {k: v for k, v in lines[-1].items() if k.startswith("timing_s/")}
    total, idle_engine, idle_learner = (
        phases.pop(f"timing_s/{name}") for name in ("step", "idle_engine", "idle_learner")
    )
    # The learner waits for the episodes, and the engine for the rest of the step before.
    assert idle_learner >= phases["timing_s/gen"] and idle_engine > 0
    assert sum(phases.values()) == pytest.approx(total, rel=1e-6)
    episodes = list(read_trajectories(whole / "trajectories" / "2.jsonl"))
    assert len(episodes) == 8 and all(isinstance(e, Trajectory) for e in episodes)


@pytest.mark.parametrize("recipe", ["ppo", "gigpo", "remax"])
def test_other_recipes_run_through_the_same_loop(tmp_path, recipe):
    more = ("train.total_steps = 2", f"algorithm.recipe = '{recipe}'", "algorithm.ppo_epochs = 2")
    more += ("train.val_before_train = False", "train.profile_steps = [2]")
    train.main(arguments(tmp_path, *more))
    first, *_, last = metrics(tmp_path)
    assert last["actor/grad_norm"] > 0
    assert last["env_pool/maze/leases"] > first["env_pool/maze/leases"] >= 8
    assert ("critic/vf_explained_var" in last) == (recipe == "ppo")
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["2"]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    (trace,) = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    phases = {k.removeprefix("timing_s/") for k in last if k.startswith("timing_s/")}
    phases -= {"step", "other", "report", "testing", "save_checkpoint"}  # after the step
    phases -= {"idle_learner", "idle_engine"}
    assert phases and phases <= {event.get("name") for event in events}


def test_trees_are_trained_on_with_the_log_probs_of_their_tokens(tmp_path):
    more = ("train.total_steps = 2", "algorithm.recipe = 'sibling'", "train.group_size = 2")
    more += ("train.val_before_train = False", "rollout.strategy = 'tree'")
    more += ("rollout.strategy_parameters = {'branch_at': 'entropy', 'points': 2, 'width': 2}",)
    train.main(arguments(tmp_path, *more))
    for line in metrics(tmp_path):
        assert line["rollout/episodes"] == 12 and line["rollout/failed"] == 0
        assert line["actor/grad_norm"] > 0
        assert line["mismatch/log_prob_diff_mean"] < 1e-4
    episodes = list(read_trajectories(tmp_path / "trajectories" / "1.jsonl"))
    by_uid = {episode.uid: episode for episode in episodes}
    branches = [episode for episode in episodes if episode.parent]
    assert len(branches) == 8
    for branch in branches:
        trunk = by_uid[branch.parent]
        assert [t.action for t in branch.turns[: branch.branch_turn]] == [
            t.action for t in trunk.turns[: branch.branch_turn]
        ]


def test_recorded_episodes_are_trained_on_offline(tmp_path):
    more = ("train.total_steps = 2", "algorithm.recipe = 'grpo'", "train.val_before_train = False")
    train.main(arguments(tmp_path / "played", *more))
    # A small model never wins: every second episode of a group is declared a success.
    for step in (1, 2):
        file = tmp_path / "played" / "trajectories" / f"{step}.jsonl"
        episodes = [json.loads(line) for line in file.read_text().splitlines()]
        for number, recorded in enumerate(episodes):
            recorded["success"] = number % 2 == 0
            del recorded["checksum"]
        file.write_text("".join(json.dumps(recorded) + "\n" for recorded in episodes))
    model = tmp_path / "played" / "warm_start" / "export" / "2"
    offline = [p for p in SMALL if not p.startswith(("scratch.", "warm_start."))]
    offline += ["train.val_before_train = False", f"model.path = '{model}'"]
    offline += [f"train.trajectories = ['{tmp_path / 'played'}']"]

    def run(name, *own):
        every = [*offline, *own, f"train.run_dir = '{tmp_path / name}'"]
        train.main([f"--gin_param={param}" for param in every])
        return metrics(tmp_path / name)

    lines = run("dpo", "algorithm.recipe = 'dpo'", "train.total_steps = 4")
    losses = [line["dpo/loss"] for line in lines]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5), "at first the policy is the reference"
    assert losses[-1] < losses[0] and lines[-1]["dpo/accuracy"] > 0.5
    assert [line["rollout/episodes"] for line in lines] == [8.0] * 4
    (line,) = run("rft", "algorithm.recipe = 'rft'", "train.total_steps = 1")
    assert line["rollout/used"] == 4 and line["episode/success_rate"] == 1
    assert line["actor/loss"] > 0 and line["critic/advantages/min"] == 1

    with pytest.raises(RecordedError, match=r"is in train\.run_dir"):
        run("played", "algorithm.recipe = 'rft'", "train.total_steps = 1")
    (tmp_path / "played" / "trajectories" / "2.jsonl").unlink()
    with pytest.raises(RecordedError, match="not those that this run began with"):
        run("rft", "algorithm.recipe = 'rft'", "train.total_steps = 2")


def error_of(capsys, monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["train", *args])
    with pytest.raises(SystemExit) as stopped:
        command.run(train.main)
    assert stopped.value.code == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("error: ") and "\n" not in text
    return text


@pytest.mark.bug("B5")
@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("algorithm.recipe = 'grpoo'", "unknown recipe 'grpoo'"),
        ("algorithm.recipe = 'dr_grpo'", "algorithm.norm_constant is not set"),
        ("algorithm.aggregation = 'mean'", "unknown loss aggregation 'mean'"),
        ("algorithm.reward = 'nice'", "nice"),
        ("algorithm.corrections = ['x']", "'x'"),
        ("train.group_size = 1", "train.group_size must be at least 2"),
        ("rollout.max_total_tokens = 1024", "is more than data.max_length = 512"),
        ("rollout.action_format = 'telepathy'", "telepathy"),
        ("rollout.strategy = 'search'", "unknown rollout strategy 'search'"),
        ("algorithm.beta = 0.2", "algorithm.beta = 0.2 is not read: recipe grpo compares no pairs"),
        ("train.trajectories = ['runs/x']", "train.trajectories needs model.path"),
        ("rollout.strategy_parameters = {'n': 2}", "'episode' has no parameter 'n'"),
        ("env.names = ['chess']", "chess"),
        ("warm_start.steps = 0", "set warm_start.steps"),
        ('rollout.prompt_source = "per_turn"', "set warm_start.steps to 0"),
        ("mesh.tensor = 3", "not divisible by 3"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    tmp_path, capsys, monkeypatch, param, message
):
    args = arguments(tmp_path / "run", param)
    assert message in error_of(capsys, monkeypatch, *args)
    assert not (tmp_path / "run").exists()
