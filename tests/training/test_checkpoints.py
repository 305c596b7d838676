"""Checkpoints are exact, can be restored onto any mesh, and are never partial."""

import contextlib
import errno
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys

import chex
import jax
import numpy as np
import optax
import pytest

from manus_jax.files import CHECKSUMS, DamagedError, verify_checksums
from manus_jax.learner.mesh import make_mesh
from manus_jax.learner.update import abstract_state, init_state, state_shardings
from manus_jax.models.architecture import Architecture
from manus_jax.models.orbax_params import CheckpointError, find_checkpoint
from manus_jax.models.transformer import Compute, Transformer, abstract_model, init_params
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.run_directory import RunDirectoryError, disk_errors

pytestmark = pytest.mark.slow

ARCH = Architecture("qwen3", 64, 32, 64, 2, 8, 8, 8, qk_norm=True)
OPTIMIZER = optax.adamw(1e-3)


def new_state(sizes, seed=0):
    mesh = make_mesh(*sizes)
    _, shapes = abstract_model(Transformer, ARCH, Compute())
    shardings = state_shardings(shapes, OPTIMIZER, mesh)
    params = init_params(Transformer, ARCH, Compute(), seed, shardings.params)
    return init_state(params, OPTIMIZER, mesh), shardings


def test_a_state_comes_back_exactly_on_another_mesh_though_it_was_donated_at_once(tmp_path):
    state, _ = new_state((2, 4, 1))
    before = jax.tree.map(np.array, jax.device_get(state))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"policy": state}, {"cursor": [1, "two"]})
    spoil = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    for _ in range(3):
        state = spoil(state)
    jax.block_until_ready(state)
    checkpoints.wait()
    other, shardings = new_state((1, 2, 4), seed=1)
    states, host = checkpoints.restore(3, {"policy": abstract_state(other, shardings)})
    restored = states["policy"]
    chex.assert_trees_all_equal(jax.device_get(restored), before)
    assert host == {"cursor": [1, "two"]}
    assert restored.params["backbone"]["embed"].sharding == shardings.params["backbone"]["embed"]
    checkpoints.close()


def test_only_the_newest_are_kept(tmp_path):
    state, _ = new_state((8, 1, 1))
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, {"policy": state}, {})
        checkpoints.wait()
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]


def test_the_best_stays_beside_the_newest_with_all_its_parts(tmp_path):
    state, shardings = new_state((8, 1, 1))
    checkpoints = Checkpoints(tmp_path, keep=1, parts=("policy", "critic"), best=True)
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5)):
        checkpoints.save(step, {"policy": state, "critic": state}, {"step": step}, score)
        checkpoints.wait()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "4"]
    target = abstract_state(state, shardings)
    states, host = checkpoints.restore(2, {"policy": target, "critic": target})
    chex.assert_trees_all_equal(jax.device_get(states["critic"]), jax.device_get(state))
    assert host == {"step": 2}
    checkpoints.close()


def test_a_score_that_arrives_after_its_checkpoint_counts_and_survives_a_restart(tmp_path, capsys):
    state, _ = new_state((8, 1, 1))
    checkpoints = Checkpoints(tmp_path, keep=1, best=True)
    checkpoints.save(1, {"policy": state}, {}, 0.2)
    checkpoints.save(2, {"policy": state}, {})
    checkpoints.add_score(2, 0.9)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=1, best=True)
    for step, score in ((3, 0.5), (4, None)):
        checkpoints.save(step, {"policy": state}, {}, score)
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "4"]
    assert not capsys.readouterr().out
    scores, rng = tmp_path / "late_scores.json", np.random.default_rng(0)
    whole = scores.read_bytes()
    for _ in range(20):
        flip_a_bit(scores, rng)
        Checkpoints(tmp_path).close()
        assert f"{scores} is damaged" in capsys.readouterr().out
        scores.write_bytes(whole)


KILLED = """
import sys, os, threading, time
from pathlib import Path
import jax, jax.numpy as jnp
from manus_jax.learner.update import TrainState
from manus_jax.training.checkpoints import Checkpoints

root = Path(sys.argv[1])
big = {f"p{i}": jnp.full((1000, 1000), float(i)) for i in range(40)}
state = TrainState(big, {"m": big}, jnp.int32(1), jnp.int32(0))
checkpoints = Checkpoints(root)
checkpoints.save(1, {"policy": state}, {"n": 1})
checkpoints.wait()
print("first", flush=True)
checkpoints.save(2, {"policy": state}, {"n": 2})
while not (root / "2").exists():
    pass
print("second begun", flush=True)
time.sleep(60)
"""


@pytest.mark.bug("B34")
def test_a_checkpoint_cut_short_by_a_kill_is_never_taken_for_a_whole_one(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    assert process.stdout.readline() == "first\n"
    assert process.stdout.readline() == "second begun\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    complete = (tmp_path / "2" / CHECKSUMS).exists()
    checkpoints = Checkpoints(tmp_path)
    # The checksums may have come just before the kill; then step 2 must be whole.
    newest = checkpoints.latest()
    assert newest == (2 if complete else 1)
    assert find_params(tmp_path, newest)
    checkpoints.close()


def find_params(root, step):
    return (root / str(step) / "params" / "_METADATA").exists()


def test_paths_without_a_checkpoint_are_errors_that_describe_one(tmp_path):
    with pytest.raises(CheckpointError, match="contains no checkpoint: expected a run directory"):
        find_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "4" / "params").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="model is missing"):
        find_checkpoint(tmp_path)


def test_runs_and_steps_are_distinguished_for_any_name_of_the_parent_directory(tmp_path):
    runs = tmp_path / "checkpoints"  # where someone keeps runs
    step = runs / "5" / "checkpoints" / "4"
    step.mkdir(parents=True)
    (runs / "5" / "model").mkdir()
    (runs / "5" / "model" / "config.json").write_text("{}")
    for path in (runs / "5", runs / "5" / "checkpoints", step):
        assert find_checkpoint(path) == (step, runs / "5" / "model")
    for path in (step.with_name("99"), tmp_path / "none"):
        with pytest.raises(CheckpointError, match="contains no checkpoint"):
            find_checkpoint(path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    state, _ = new_state((8, 1, 1))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"policy": state}, {})
    checkpoints.wait()
    mesh = make_mesh(8, 1, 1)
    other = Architecture("qwen3", 96, 32, 64, 2, 8, 8, 8, qk_norm=True)
    _, shapes = abstract_model(Transformer, other, Compute())
    shardings = state_shardings(shapes, OPTIMIZER, mesh)
    target = init_state(
        init_params(Transformer, other, Compute(), 0, shardings.params), OPTIMIZER, mesh
    )
    with pytest.raises(CheckpointError, match="does not fit this configuration"):
        checkpoints.restore(1, {"policy": abstract_state(target, shardings)})
    checkpoints.close()


def files_of(step_dir):
    return sorted(p for p in step_dir.rglob("*") if p.is_file())


def flip_a_bit(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


DAMAGE = {
    "flipped bit in params": lambda d: flip_a_bit(
        max((d / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file()),
        np.random.default_rng(0),
    ),
    "flipped bit in host": lambda d: flip_a_bit(d / "host" / "metadata", np.random.default_rng(1)),
    "truncated": lambda d: (d / "host" / "metadata").write_text(""),
    "missing file": lambda d: (d / "host" / "metadata").unlink(),
    "missing item": lambda d: shutil.rmtree(d / "optimizer"),
    "missing checksums": lambda d: (d / CHECKSUMS).unlink(),
    "empty": lambda d: (shutil.rmtree(d), d.mkdir()),
    "file": lambda d: (shutil.rmtree(d), d.write_text("")),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three checkpoints, and the state that is in all of them."""
    directory = tmp_path_factory.mktemp("saved")
    state, shardings = new_state((8, 1, 1))
    checkpoints = Checkpoints(directory)
    for step in (2, 4, 6):
        checkpoints.save(step, {"policy": state}, {"step": step}, score=0.5)
    checkpoints.close()
    return directory, state, shardings


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "checkpoints")


def test_every_flipped_bit_is_found_in_every_file(saved):
    rng, step_dir = np.random.default_rng(0), saved[0] / "4"
    files = files_of(step_dir)
    assert len(files) > 10
    for path in files:
        whole = path.read_bytes()
        for _ in range(3 if whole else 0):
            flip_a_bit(path, rng)
            with pytest.raises(DamagedError):
                verify_checksums(step_dir)
            path.write_bytes(whole)
    verify_checksums(step_dir)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_moved_aside_and_the_previous_one_used(
    copied, saved, capsys, kind
):
    DAMAGE[kind](copied / "6")
    DAMAGE[kind](copied / "4")
    checkpoints = Checkpoints(copied)
    assert checkpoints.latest() == 2
    told = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in told] == [
        f"checkpoint {step} is damaged and was moved to {copied}/damaged-{step}" for step in (6, 4)
    ]
    assert sorted(p.name for p in copied.iterdir()) == ["2", "damaged-4", "damaged-6"]
    _, state, shardings = saved
    states, host = checkpoints.restore(2, {"policy": abstract_state(state, shardings)})
    chex.assert_trees_all_equal(jax.device_get(states["policy"]), jax.device_get(state))
    assert host == {"step": 2}
    checkpoints.save(4, {"policy": state}, {})
    checkpoints.close()
    DAMAGE[kind](copied / "4")
    assert Checkpoints(copied).latest() == 2
    assert (copied / "damaged-4-2").exists()


@pytest.mark.parametrize("strict", [False, True])
def test_without_an_intact_checkpoint_or_in_strict_mode_nothing_is_moved(copied, strict):
    for step in (6,) if strict else (2, 4, 6):
        DAMAGE["truncated"](copied / str(step))
    checkpoints = Checkpoints(copied, strict=strict)
    message = "strict_resume is set" if strict else "no other one in .* is intact"
    with pytest.raises(CheckpointError, match=rf"checkpoint 6 is damaged .*{message}"):
        checkpoints.latest()
    assert sorted(p.name for p in copied.iterdir()) == ["2", "4", "6"]


def test_leftovers_of_a_kill_are_removed_silently_and_unknown_files_ignored(copied, capsys):
    (copied / ".unfinished-6").touch()  # killed before the checksums were written
    (copied / "6" / CHECKSUMS).unlink()
    (copied / ".unfinished-4").touch()  # killed just after they were
    (copied / "8.orbax-checkpoint-tmp").mkdir()
    (copied / "notes.txt").write_text("")
    (copied / "007").mkdir()
    assert find_checkpoint_step(copied) == 4
    assert Checkpoints(copied).latest() == 4
    assert sorted(p.name for p in copied.iterdir()) == ["007", "2", "4", "notes.txt"]
    assert capsys.readouterr().out == ""


def find_checkpoint_step(directory):
    (directory.parent / "model").mkdir()
    (directory.parent / "model" / "config.json").write_text("{}")
    return int(find_checkpoint(directory)[0].name)


def test_a_failed_save_is_raised_and_leaves_no_checkpoint(tmp_path, monkeypatch):
    def full(directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state, _ = new_state((8, 1, 1))
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr("manus_jax.models.orbax_params.write_checksums", full)
    checkpoints.save(1, {"policy": state}, {})
    with pytest.raises(OSError, match="No space left"):
        checkpoints.wait()
    assert Checkpoints(tmp_path).latest() is None
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def files_of_at_most(size):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


def test_arrays_that_cannot_be_written_are_one_line_without_tracebacks(tmp_path, caplog):
    state, _ = new_state((8, 1, 1))
    checkpoints = Checkpoints(tmp_path)
    refused = pytest.raises(RunDirectoryError, match="cannot be written any more: File too large")
    with files_of_at_most(500), refused, disk_errors(tmp_path):
        checkpoints.save(1, {"policy": state}, {})
        checkpoints.wait()
    gc.collect()  # asyncio logs the errors of tasks when they are collected
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_threads_that_report_to_a_save_that_has_failed_print_no_traceback(capsys):
    sys.excepthook(RuntimeError, RuntimeError("Event loop is closed"), None)
    assert capsys.readouterr().err == ""
    sys.excepthook(RuntimeError, RuntimeError("something else"), None)
    assert "something else" in capsys.readouterr().err
