"""A run directory: what may change between two starts of one run, and what may not."""

import subprocess
import sys

import pytest

from manus_jax.training.run_directory import RunDirectory, RunDirectoryError

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
def test_what_is_learned_may_not(tmp_path, old, new, named):
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


def test_two_processes_do_not_write_to_one_run_and_a_killed_one_leaves_it_free(tmp_path):
    code = (
        "import sys, time; from manus_jax.training.run_directory import RunDirectory\n"
        "held = RunDirectory(sys.argv[1], ''); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match="another process is using "):
            RunDirectory(tmp_path / "run", CONFIG)
        other.kill()
    RunDirectory(tmp_path / "run", "")
