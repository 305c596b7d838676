"""`python -m manus_jax.sft` as a user runs it: learning, exact resume, error messages."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from manus_jax import command, convert, sft
from manus_jax.training import supervised

ROOT = Path(__file__).parents[2]
SMALL = (
    "sft.batch_size = 4",
    "sft.seed = 5",
    "data.max_length = 128",
    "data.rows = 8",
    "scratch.vocab_size = 300",
    "scratch.hidden_size = 32",
    "scratch.intermediate_size = 64",
    "scratch.num_layers = 2",
    "scratch.head_dim = 8",
    "optimizer.lr = 0.01",
)


def write_conversations(path, count, offset=0):
    with path.open("w") as file:
        for i in range(offset, offset + count):
            turns = [{"role": "user", "content": f"count from {i % 7}"}]
            turns += [{"role": "assistant", "content": " ".join(map(str, range(i % 7, i % 7 + 5)))}]
            turns += [{"role": "user", "content": "again"}, turns[1]]
            file.write(json.dumps({"item_id": f"count_{i}", "messages": turns}) + "\n")


@pytest.fixture
def data(tmp_path):
    write_conversations(tmp_path / "train.jsonl", 30)
    write_conversations(tmp_path / "val.jsonl", 6, offset=100)
    return [
        f"data.train_files = ['{tmp_path}/train.jsonl']",
        f"data.val_files = ['{tmp_path}/val.jsonl']",
    ]


def arguments(run_dir, data, *more):
    params = [*SMALL, *data, f"sft.run_dir = '{run_dir}'", *more]
    return [f"--gin_param={p}" for p in params]


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def exported(run_dir, step):
    return load_file(run_dir / "export" / str(step) / "model.safetensors")


def test_it_learns_resumes_after_kills_to_the_bit_and_exports(tmp_path, data):
    more = ("sft.total_steps = 40", "sft.save_freq = 5", "sft.test_freq = 8")
    whole = tmp_path / "whole"
    sft.main(arguments(whole, data, *more))
    lines = metrics(whole)
    assert [line["step"] for line in lines] == list(range(41))
    last = lines[-1]
    assert last["val/loss"] < 0.5 * last["val/unigram_entropy"] < lines[0]["val/loss"]

    killed = tmp_path / "killed"
    run = [sys.executable, "-m", "manus_jax.sft", *arguments(killed, data, *more)]
    for step in (7, 16):
        process = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, env=dict(os.environ))
        while process.poll() is None and not reached(killed, step):
            time.sleep(0.02)
        assert process.poll() is None, "the run ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    sft.main(arguments(killed, data, *more))
    assert [line["step"] for line in metrics(killed)] == list(range(41))
    for name, tensor in exported(whole, 40).items():
        np.testing.assert_array_equal(exported(killed, 40)[name], tensor, err_msg=name)
    same = lambda line: {k: v for k, v in line.items() if not k.startswith(("timing", "perf"))}
    assert [same(a) for a in metrics(killed)] == [same(a) for a in lines]

    # If the newest checkpoint is damaged, the run goes on from the one before, to the same bits.
    damaged = Path(shutil.copytree(whole, tmp_path / "damaged"))
    shutil.rmtree(damaged / "export")
    files = [p for p in (damaged / "checkpoints" / "40" / "params").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    data_of = bytearray(largest.read_bytes())
    data_of[len(data_of) // 2] ^= 4
    largest.write_bytes(data_of)
    sft.main(arguments(damaged, data, *more))
    assert [p.name for p in (damaged / "checkpoints").glob("damaged-*")] == ["damaged-40"]
    for name, tensor in exported(whole, 40).items():
        np.testing.assert_array_equal(exported(damaged, 40)[name], tensor, err_msg=name)
    assert [same(a) for a in metrics(damaged)] == [same(a) for a in lines]

    # The checkpoint converts to the same directory that the run exported, and back.
    convert.main(["to-hf", "--checkpoint", str(whole), "--out", str(tmp_path / "hf")])
    convert.main(["from-hf", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "orbax")])
    convert.main(["to-hf", "--checkpoint", str(tmp_path / "orbax"), "--out", str(tmp_path / "2")])
    weights = [
        (p / "model.safetensors").read_bytes()
        for p in (whole / "export" / "40", tmp_path / "hf", tmp_path / "2")
    ]
    assert weights[0] == weights[1] == weights[2]

    # Fine-tuning goes on from a run, or from the exported directory, where the first one stopped.
    for source in (whole, tmp_path / "hf"):
        again = tmp_path / f"again-{source.name}"
        keep = [p for p in SMALL if not p.startswith("scratch")]
        args = [*keep, *data, f"model.path = '{source}'", f"sft.run_dir = '{again}'"]
        sft.main([f"--gin_param={p}" for p in [*args, "sft.total_steps = 1"]])
        assert metrics(again)[0]["val/loss"] == pytest.approx(last["val/loss"], rel=1e-5)


def reached(run_dir, step):
    path = run_dir / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) > step


def error_of(capsys, monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["sft", *args])
    with pytest.raises(SystemExit) as stopped:
        command.run(sft.main)
    assert stopped.value.code == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("error: ") and "\n" not in text
    return text


def test_mistakes_end_in_one_line_before_anything_is_written(tmp_path, data, capsys, monkeypatch):
    run_dir = tmp_path / "run"

    def error(*more, files=data):
        return error_of(capsys, monkeypatch, *arguments(run_dir, files, *more))

    assert "unknown setting sft.total_step" in error("sft.total_step = 3")
    no_scratch = [p for p in SMALL if not p.startswith("scratch")]
    args = [*no_scratch, *data, f"sft.run_dir = '{run_dir}'", "model.path = 'nowhere'"]
    text = error_of(capsys, monkeypatch, *(f"--gin_param={p}" for p in args))
    assert "the model nowhere does not exist" in text
    assert "scratch.vocab_size is set, but sft with model.path does not read it" in error(
        "model.path = 'nowhere'"
    )
    assert "needs 3 devices and there are 8" in error("mesh.data = 3", "mesh.fsdp = 1")
    assert "6 rows per micro-batch are not divisible" in error("data.rows = 6")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    assert "no assistant turn" in error(files=[f"data.train_files = ['{bad}']"])
    assert "none.parquet" in error(files=["data.train_files = ['none.parquet']"])
    assert not run_dir.exists()


def test_a_run_directory_with_another_configuration_is_an_error_that_lists_the_differences(
    tmp_path, data, capsys, monkeypatch
):
    sft.main(arguments(tmp_path / "run", data, "sft.total_steps = 1"))
    args = arguments(tmp_path / "run", data, "sft.total_steps = 2", "optimizer.lr = 0.5")
    text = error_of(capsys, monkeypatch, *args)
    assert "optimizer.lr was 0.01 and is 0.5" in text and "total_steps" not in text


def test_updates_that_are_never_finite_end_the_run_without_an_export(
    tmp_path, data, capsys, monkeypatch
):
    monkeypatch.setattr(supervised, "learning_rate", lambda *_: lambda count: 1e30)
    text = error_of(capsys, monkeypatch, *arguments(tmp_path / "run", data, "sft.total_steps = 8"))
    assert "3 updates of the model in a row were not finite" in text
    # The run is too short for three, and its model is still the initial one.
    args = arguments(tmp_path / "short", data, "sft.total_steps = 2")
    assert "none of 2 steps updated the model" in error_of(capsys, monkeypatch, *args)
    assert not list(tmp_path.glob("*/export"))


def test_conversations_that_never_fit_are_an_error_not_an_empty_update(
    tmp_path, data, capsys, monkeypatch
):
    short = ("data.max_length = 8", "data.overlong = 'drop'")
    args = arguments(tmp_path / "run", data[:1], *short)
    text = error_of(capsys, monkeypatch, *args)
    assert "all 4 conversations of a batch are longer" in text and "overlong = 'cut'" in text
    turns = [{"role": role, "content": "very long " * 99} for role in ("user", "assistant")]
    (tmp_path / "val.jsonl").write_text(json.dumps({"item_id": "long_0", "messages": turns}))
    text = error_of(capsys, monkeypatch, *arguments(tmp_path / "run2", data))
    assert "first answer ends after data.max_length = 128" in text
    assert "overlong" not in text  # it is 'cut' already
