"""`python -m manus_jax.convert` with bad input: one line, before weights are read or written."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from manus_jax import command, convert
from manus_jax.data.chat import train_tokenizer
from manus_jax.files import CHECKSUMS, write_checksums
from manus_jax.models import conversion, huggingface
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, init_params

pytestmark = pytest.mark.slow

ARCH = Architecture("qwen2", 300, 16, 32, 1, 2, 2, 8, qkv_bias=True, tie_embeddings=False)
WEIGHTS = "model.safetensors"
ROPE = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model directory with a tokenizer, and the run that it is converted to."""
    root = tmp_path_factory.mktemp("made")
    train_tokenizer(["some text"], 300, root / "tokenizer")
    card = huggingface.new_card(ARCH, root / "tokenizer")
    huggingface.save_hf(init_params(Transformer, ARCH, Compute(), 0), card, root / "hf")
    conversion.from_hf(root / "hf", root / "run")
    return root


@pytest.fixture
def hf(made, tmp_path):
    """A copy without checksums, like a directory from elsewhere."""
    shutil.copytree(made / "hf", tmp_path / "hf")
    (tmp_path / "hf" / CHECKSUMS).unlink()
    return tmp_path / "hf"


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made / "run", tmp_path / "run")


def error_of(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        command.run(convert.main)
    assert stopped.value.code == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("error: ") and "\n" not in text
    return text


def edit(path, **changes):
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | changes))


def change_tensor(directory, name, change):
    tensors = load_file(directory / WEIGHTS)
    tensors[name] = change(tensors[name])
    save_file(tensors, directory / WEIGHTS)


def set_first(value):
    def change(tensor):
        tensor = tensor.copy()
        tensor.flat[0] = value
        return tensor

    return change


BAD_MODELS = {
    "a file": (lambda d: (shutil.rmtree(d), d.write_text("")), "is not a directory"),
    "nothing": (shutil.rmtree, "does not exist"),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "config.json is not valid"),
    "binary config": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "not valid JSON"),
    "deep config": (lambda d: (d / "config.json").write_text("[" * 100_000), "not valid JSON"),
    "a list": (lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
    "wrong type": (lambda d: edit(d / "config.json", hidden_size="many"), "wrong type"),
    "null": (lambda d: edit(d / "config.json", vocab_size=None), "wrong type"),
    "infinite": (lambda d: edit(d / "config.json", hidden_size=float("inf")), "wrong type"),
    "no heads": (lambda d: edit(d / "config.json", num_attention_heads=0), "num_heads is 0"),
    "negative": (lambda d: edit(d / "config.json", num_hidden_layers=-1), "num_layers is -1"),
    "NaN": (lambda d: edit(d / "config.json", rms_norm_eps=float("nan")), "norm_eps is nan"),
    "a list of types": (lambda d: edit(d / "config.json", model_type=["qwen2"]), "not supported"),
    "no rope factor": (
        lambda d: edit(d / "config.json", rope_parameters=dict(ROPE, factor=0)),
        "rope scaling (0.0, 1.0, 4.0, 8192) must be positive",
    ),
    "many layers": (lambda d: edit(d / "config.json", num_hidden_layers=10**9), "only 15 tensors"),
    "other shape": (lambda d: edit(d / "config.json", hidden_size=32), "config.json says"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "contains no weights"),
    "empty weights": (lambda d: (d / WEIGHTS).write_bytes(b""), "cannot be read as safetensors"),
    "broken index": (lambda d: (d / INDEX).write_text("{"), "index.json is not valid JSON"),
    "empty index": (lambda d: (d / INDEX).write_text("{}"), "no weight_map"),
    "list index": (lambda d: (d / INDEX).write_text('{"weight_map": []}'), "no weight_map"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{"), "files are damaged"),
    "odd tokenizer": (lambda d: (d / "tokenizer.json").write_text("[]"), "files are damaged"),
    "NaN weight": (
        lambda d: change_tensor(d, "model.norm.weight", set_first(np.nan)),
        "model.norm.weight contains values that are not finite",
    ),
    "infinite weight": (
        lambda d: change_tensor(d, "model.layers.0.mlp.up_proj.weight", set_first(-np.inf)),
        "up_proj.weight contains values that are not finite",
    ),
    "integers": (
        lambda d: change_tensor(d, "model.norm.weight", lambda t: t.astype(np.int32)),
        "type I32, which is not supported",
    ),
}


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_bad_model_directory_is_one_line_and_nothing_is_written(
    hf, tmp_path, capsys, monkeypatch, kind
):
    damage, message = BAD_MODELS[kind]
    damage(hf)
    out = tmp_path / "out"
    assert message in error_of(capsys, monkeypatch, "from-hf", "--hf", hf, "--out", out)
    assert not list(out.glob("*/*"))


@pytest.mark.parametrize("name", ["/etc/passwd", "../other.safetensors", "a/b.safetensors", 3, ""])
def test_an_index_names_files_of_its_own_directory_only(hf, tmp_path, capsys, monkeypatch, name):
    (hf / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    text = error_of(capsys, monkeypatch, "from-hf", "--hf", hf, "--out", tmp_path / "out")
    assert f"names {name!r}, which is not the name of a safetensors file" in text


@pytest.mark.parametrize("name", ["../stolen.safetensors", "{outside}/stolen.safetensors"])
def test_a_model_card_cannot_write_outside_the_output(run, tmp_path, capsys, monkeypatch, name):
    (tmp_path / "outside").mkdir()
    name = name.format(outside=tmp_path / "outside")
    card = run / "model" / "weights.json"
    record = json.loads(card.read_text())
    edit(card, files=dict.fromkeys(record["files"], name))
    write_checksums(run / "model")
    out = tmp_path / "deep" / "out"
    text = error_of(capsys, monkeypatch, "to-hf", "--checkpoint", run, "--out", out)
    assert "is not the name of a safetensors file" in text
    assert not list(tmp_path.rglob("stolen*"))


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"types": {}, "files": {}}', '{"types": {"x": []}, "files": {"x": "y"}}'],
)
def test_a_model_card_that_does_not_fit_is_one_line(run, tmp_path, capsys, monkeypatch, content):
    (run / "model" / "weights.json").write_text(content)
    write_checksums(run / "model")
    to_hf = ("to-hf", "--checkpoint", run, "--out", tmp_path / "out")
    assert "weights.json" in error_of(capsys, monkeypatch, *to_hf)
    (run / "model" / "weights.json").unlink()
    assert "weights.json is missing" in error_of(capsys, monkeypatch, *to_hf)


def test_a_checkpoint_of_another_shape_is_one_line(run, tmp_path, capsys, monkeypatch):
    edit(run / "model" / "config.json", vocab_size=304)
    write_checksums(run / "model")
    to_hf = ("to-hf", "--checkpoint", run, "--out", tmp_path / "out")
    text = error_of(capsys, monkeypatch, *to_hf)
    assert "['embed'] has shape (300, 16) on disk, expected (304, 16)" in text


def test_a_link_out_of_the_directory_is_not_copied_but_a_cache_of_hugging_face_is(
    hf, tmp_path, capsys, monkeypatch
):
    (tmp_path / "secret").write_text("key")
    (hf / "notes.txt").symlink_to(tmp_path / "secret")
    text = error_of(capsys, monkeypatch, "from-hf", "--hf", hf, "--out", tmp_path / "out")
    assert "notes.txt is a link to" in text
    (hf / "notes.txt").unlink()

    snapshot, blobs = tmp_path / "cache" / "snapshots" / "1a2b", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(hf.iterdir())):
        path.rename(blobs / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    conversion.from_hf(snapshot, tmp_path / "from_cache")
    copied = tmp_path / "from_cache" / "model" / "tokenizer.json"
    assert copied.is_file() and not copied.is_symlink()


def test_damage_of_a_run_or_an_export_is_found(run, made, tmp_path, capsys, monkeypatch):
    def flip(path):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    to_hf = ("to-hf", "--checkpoint", run, "--out", tmp_path / "out")
    for path in sorted(p for p in (run / "checkpoints" / "0").rglob("*") if p.stat().st_size):
        if path.is_file():
            whole = path.read_bytes()
            flip(path)
            assert "checkpoints/0 is damaged" in error_of(capsys, monkeypatch, *to_hf), path
            path.write_bytes(whole)
    flip(run / "model" / "tokenizer.json")
    assert f"tokenizer.json does not match {CHECKSUMS}" in error_of(capsys, monkeypatch, *to_hf)
    export = shutil.copytree(made / "hf", tmp_path / "export")
    flip(export / WEIGHTS)
    text = error_of(capsys, monkeypatch, "from-hf", "--hf", export, "--out", tmp_path / "out")
    assert f"{WEIGHTS} does not match {CHECKSUMS}" in text
    assert not (tmp_path / "out").exists()


def test_outputs_that_cannot_be_written_or_are_not_new(
    made, tmp_path, hf, run, capsys, monkeypatch
):
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "below", tmp_path / ("x" * 300)):
        text = error_of(capsys, monkeypatch, "from-hf", "--hf", hf, "--out", out)
        assert "argument --out: " in text and ("not a directory" in text or "file name" in text)
        text = error_of(capsys, monkeypatch, "to-hf", "--checkpoint", run, "--out", out)
        assert "argument --out: " in text and ("not a directory" in text or "file name" in text)
    text = error_of(capsys, monkeypatch, "to-hf", "--checkpoint", run, "--out", hf)
    assert "exists and is not empty" in text
    text = error_of(capsys, monkeypatch, "from-hf", "--hf", hf, "--out", run)
    assert "holds a run already" in text
    text = error_of(capsys, monkeypatch, "from-hf", "--hf", hf, "--out", tmp_path)
    assert "is not empty, it contains " in text


def test_a_home_directory_in_a_flag_is_expanded(hf, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    convert.main(["from-hf", f"--hf={hf}", "--out=~/run"])
    assert (tmp_path / "home/run/checkpoints/0").is_dir() and not Path("~").exists()


def test_a_conversion_that_was_killed_can_be_run_again(hf, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints" / "0").mkdir(parents=True)
    (out / "checkpoints" / ".unfinished-0").touch()
    conversion.from_hf(hf, out)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / WEIGHTS).write_bytes(b"half")
    (tmp_path / ".unfinished-back").touch()
    conversion.to_hf(out, tmp_path / "back")
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (hf / WEIGHTS).read_bytes()
    assert not list(tmp_path.glob(".*back*"))


def test_a_model_without_a_tokenizer_is_converted_and_said_to_have_none(hf, tmp_path, capsys):
    for path in hf.glob("tokenizer*"):
        path.unlink()
    conversion.from_hf(hf, tmp_path / "out")
    assert "has no tokenizer" in capsys.readouterr().out
