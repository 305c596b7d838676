"""A run directory: settings that may change between two starts of a run, and others."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from manus_jax.config.commands import READS, read_sft_config, read_train_config
from manus_jax.config.run_config import config_text, read_bindings
from manus_jax.files import DirectoryInUse
from manus_jax.status import STATUS
from manus_jax.training import run_directory, supervised
from manus_jax.training.job import Job
from manus_jax.training.run_directory import RunDirectory, RunDirectoryError
from manus_jax.training.warm_start import warm_start

CONFIG = """\
# Parameters for env:
env.names = ('maze',)
env.servers_per_env = 1
env.urls = {'maze': ['http://127.0.0.1:36001']}

# Parameters for train:
train.group_size = 8
train.total_steps = 100
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("http://127.0.0.1:36001", "http://10.0.0.7:40001"),
        ("servers_per_env = 1", "servers_per_env = 4"),
        ("total_steps = 100", "total_steps = 200"),
    ],
)
def test_where_the_servers_are_and_how_long_it_runs_may_change(tmp_path, old, new):
    RunDirectory(tmp_path / "run", CONFIG)
    assert old in CONFIG
    RunDirectory(tmp_path / "run", CONFIG.replace(old, new))
    assert new in (tmp_path / "run" / "config.gin").read_text()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [("'maze',)", "'wordle',)", "env.names"), ("group_size = 8", "group_size = 4", "group_size")],
)
def test_settings_that_affect_learning_may_not(tmp_path, old, new, named):
    RunDirectory(tmp_path / "run", CONFIG)
    with pytest.raises(RunDirectoryError, match=named):
        RunDirectory(tmp_path / "run", CONFIG.replace(old, new))
    assert (tmp_path / "run" / "config.gin").read_text() == CONFIG


def test_a_setting_that_the_older_file_does_not_have_counts_as_its_default(tmp_path):
    RunDirectory(tmp_path / "run", CONFIG)
    RunDirectory(tmp_path / "run", CONFIG + "train.batch_size = 32\n")
    with pytest.raises(RunDirectoryError, match=r"train\.val_tasks was 64 and is 5"):
        RunDirectory(tmp_path / "run", CONFIG + "train.val_tasks = 5\n")


def test_a_file_that_is_not_gin_is_refused(tmp_path):
    (tmp_path / "config.gin").write_text("(SftSettings(run_dir='x'), None)")
    with pytest.raises(RunDirectoryError, match="not a gin config"):
        RunDirectory(tmp_path, CONFIG)


@pytest.mark.slow
def test_two_processes_do_not_write_to_one_run_and_a_killed_one_leaves_it_free(tmp_path):
    code = (
        "import sys, time; from manus_jax.training.run_directory import RunDirectory\n"
        "held = RunDirectory(sys.argv[1], ''); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(DirectoryInUse, match="another process is using "):
            RunDirectory(tmp_path / "run", CONFIG)
        other.kill()
    RunDirectory(tmp_path / "run", "")


def test_a_changed_warm_start_is_refused_and_a_moved_one_is_not(tmp_path, monkeypatch):
    def opened(config, text, job, devices):
        RunDirectory(config.sft.run_dir, text)

    def start(run, *params):
        usual = (f"train.run_dir = '{run}'", "env.names = ['maze']", "warm_start.steps = 2")
        config = read_train_config([], [*usual, *params])
        directory = RunDirectory(run, config_text(config, READS["train"]))
        warm_start(config, directory, Job())

    monkeypatch.setattr(supervised, "run", opened)
    run = tmp_path / "run"
    start(run)
    written = run / "warm_start" / "config.gin"
    assert read_bindings(written.read_text())["optimizer.lr"] == 1e-3
    assert read_sft_config([str(written)], []).data.train_files == ("traces.jsonl",)
    start(run, "mesh.fsdp = 2")
    (run / "config.gin").unlink()
    with pytest.raises(RunDirectoryError, match=r"optimizer\.lr was 0\.001 and is 0\.01"):
        start(run, "warm_start.lr = 1e-2")
    run.rename(tmp_path / "moved")
    (tmp_path / "moved" / "config.gin").unlink()
    start(tmp_path / "moved")


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"train.total_steps = (", b"\0" * 100])
def test_a_damaged_config_is_one_message(tmp_path, text):
    (tmp_path / "config.gin").write_bytes(text)
    with pytest.raises(RunDirectoryError, match=r"config\.gin"):
        RunDirectory(tmp_path, CONFIG)
    assert (tmp_path / "config.gin").read_bytes() == text


def test_damaged_metrics_are_kept_in_a_copy_and_the_rest_is_used(tmp_path, capsys):
    directory = RunDirectory(tmp_path, CONFIG)
    damaged = b'{"step": 1}\n\xff\xfe\n[1]\n{"step": "2"}\n{"loss": 1}\n{"step": 3}\n{"st'
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    assert directory.metrics() == [{"step": 1}, {"step": 3}]
    directory.forget_metrics_after(2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert "metrics.jsonl has 4 damaged lines; a copy of it is" in capsys.readouterr().out
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == damaged


def test_a_line_cut_off_by_a_kill_is_dropped_silently(tmp_path, capsys):
    directory = RunDirectory(tmp_path, CONFIG)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    directory.forget_metrics_after(1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "metrics.damaged.jsonl").exists()


def test_leftovers_of_a_kill_are_removed(tmp_path):
    for name in ("export/.4.tmp-123", ".model.tmp-7"):
        (tmp_path / name).mkdir(parents=True)
    RunDirectory(tmp_path, CONFIG)
    assert not list(tmp_path.rglob("*.tmp-*"))


@pytest.mark.parametrize("name", ["checkpoints", "model", "trajectories", "export", "warm_start"])
def test_a_file_in_the_place_of_a_directory_is_named(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(RunDirectoryError, match=f"{name} is not a directory"):
        RunDirectory(tmp_path, CONFIG)


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl is not a file"):
        RunDirectory(tmp_path, CONFIG)
    (tmp_path / "metrics.jsonl").rmdir()
    (tmp_path / "config.gin").mkdir()
    with pytest.raises(RunDirectoryError, match=r"config\.gin"):
        RunDirectory(tmp_path, CONFIG)


@pytest.mark.parametrize("missing", [True, False])
def test_checkpoints_whose_settings_are_lost_are_not_continued(tmp_path, missing):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    if not missing:
        (tmp_path / "config.gin").write_text("")
    with pytest.raises(RunDirectoryError, match=r"config\.gin is missing or empty"):
        RunDirectory(tmp_path, CONFIG)
    (tmp_path / "checkpoints" / "4").rmdir()
    RunDirectory(tmp_path, CONFIG)


def test_metrics_can_be_added_to_an_earlier_step(tmp_path):
    directory = RunDirectory(tmp_path, "")
    for step in (1, 2):
        directory.append_metrics({"step": step, "loss": 0.5})
    directory.amend_metrics(1, {"val/score": 0.25})
    directory.append_metrics({"step": 3, "loss": 0.5})
    assert directory.metrics() == [
        {"step": 1, "loss": 0.5, "val/score": 0.25},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 0.5},
    ]


def test_the_status_keeps_the_newest_validation_also_of_a_resumed_run(tmp_path):
    directory = RunDirectory(tmp_path, CONFIG)
    STATUS.begin("train")
    directory.append_metrics({"step": 1, "val/score": 0.25})
    directory.append_metrics({"step": 2, "loss": 0.5})
    assert STATUS.validation == {"step": 1, "val/score": 0.25}
    directory.amend_metrics(2, {"val/score": 0.5})
    assert STATUS.validation == {"step": 2, "val/score": 0.5}
    directory.append_metrics({"step": 3, "val/score": 0.75})
    directory.flush_metrics()
    STATUS.begin("train")
    RunDirectory(tmp_path, CONFIG).forget_metrics_after(2)
    assert STATUS.validation == {"step": 2, "val/score": 0.5}


def test_metrics_are_written_at_once_until_that_takes_too_long_and_before_they_are_read(
    tmp_path, monkeypatch
):
    directory = RunDirectory(tmp_path, CONFIG)
    written = tmp_path / "metrics.jsonl"
    clock = iter([0.0, 0.0, 0.5, 9.0, 11.0, 11.0, 11.5])  # a write takes half a second
    # Only here: threads of other tests also read the clock.
    monkeypatch.setattr(run_directory, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    directory.append_metrics({"step": 1})
    assert written.read_text() == '{"step": 1}\n'
    directory.append_metrics({"step": 2})  # after 9 s; ten seconds are 20 times half a second
    assert written.read_text() == '{"step": 1}\n'
    directory.append_metrics({"step": 3})
    assert written.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    monkeypatch.undo()
    directory.append_metrics({"step": 4})
    with directory.flushing_metrics():
        directory.append_metrics({"step": 5})
    assert [json.loads(line)["step"] for line in written.read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
    ]
