"""Model directories: invalid ones are refused in one line, valid ones are loaded sharded."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import chex
import jax
import pytest
from safetensors.numpy import load_file, save_file

from manus_jax.data.chat import train_tokenizer
from manus_jax.learner.mesh import make_mesh, param_shardings
from manus_jax.models import huggingface, loading
from manus_jax.models.architecture import Architecture, ModelError, from_hf_config, to_hf_config
from manus_jax.models.transformer import Compute, Transformer, abstract_model, init_params

pytestmark = pytest.mark.slow

ARCH = Architecture("qwen2", 64, 32, 64, 2, 8, 8, 8, qkv_bias=True, tie_embeddings=False)


@pytest.fixture
def model_dir(tmp_path):
    params = init_params(Transformer, ARCH, Compute(), 0)
    huggingface.save_hf(params, huggingface.new_card(ARCH, None), tmp_path / "model")
    return tmp_path / "model"


def rewrite(path, change):
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)])
def test_weights_load_straight_onto_any_mesh(model_dir, sizes):
    mesh = make_mesh(*sizes)
    _, shapes = abstract_model(Transformer, ARCH, Compute())
    shardings = param_shardings(shapes, mesh)
    params, _ = huggingface.load_params(model_dir, shardings)
    whole, _ = huggingface.load_params(model_dir)
    chex.assert_trees_all_equal(jax.device_get(params), jax.device_get(whole))
    assert all(
        a.sharding == s
        for a, s in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
    )


def test_the_number_of_parameters_is_right(model_dir):
    tensors = load_file(model_dir / "model.safetensors")
    assert ARCH.num_params == sum(t.size for t in tensors.values())


def test_a_missing_directory_and_one_without_a_config(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        huggingface.load_params(tmp_path / "none")
    with pytest.raises(ModelError, match=r"no config\.json"):
        huggingface.load_params(tmp_path)


def test_a_model_path_that_is_not_there_names_the_host_and_the_working_directory(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    host = re.escape(socket.gethostname())
    where = re.escape(str(tmp_path))
    there = rf"^the model models/none does not exist in {where} on the host {host}:"
    with pytest.raises(ModelError, match=there):
        loading.require_path(Path("models/none"))
    with pytest.raises(ModelError, match=rf"none does not exist on the host {host}: put it there"):
        loading.from_path(tmp_path / "none")


def test_a_directory_without_weights(model_dir):
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="contains no weights"):
        huggingface.load_params(model_dir)


def test_a_directory_with_bin_files_is_refused_with_a_command_that_converts_it(tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    config = {**to_hf_config(ARCH), "model_type": "qwen2"}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config))
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    train_tokenizer(["a text"], 300, source)
    with pytest.raises(ModelError) as error:
        loading.from_path(source)
    assert "\n" not in str(error.value)
    exec(re.search(r'python -c "(.*)"$', str(error.value))[1])
    params, _ = huggingface.load_params(tmp_path / "model-safetensors")
    assert (tmp_path / "model-safetensors" / "tokenizer.json").is_file()
    expected = model.state_dict()["lm_head.weight"].numpy()
    chex.assert_trees_all_equal(jax.device_get(params["lm_head"]), expected)


@pytest.mark.parametrize("path", ["model", "model/weights.gguf"])
def test_gguf_files_are_refused_with_a_remedy(tmp_path, path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"weights.gguf is not in .* gguf_file='weights.gguf'"):
        loading.from_path(tmp_path / path)
    if path == "model":
        with pytest.raises(ModelError, match="is not in the safetensors format"):
            huggingface.read_card(tmp_path / path)


def test_an_unknown_architecture_names_those_there_are(model_dir):
    rewrite(model_dir, lambda c: c.update(model_type="mamba"))
    with pytest.raises(ModelError, match=r"'mamba' is not supported \(known: qwen2"):
        huggingface.load_params(model_dir)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0, and .* in rope_parameters"),
        ({"layer_types": ["sliding_attention"]}, "layer_types may only contain"),
        ({"layer_types": 3}, "layer_types may only contain"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_hidden_layers": True}, "True is not a whole number"),
        ({"num_hidden_layers": 2.5}, "2.5 is not a whole number"),
        ({"max_position_embeddings": 10**30}, "is not a whole number up to"),
        ({"rms_norm_eps": True}, "True is not a number"),
        ({"tie_word_embeddings": "no"}, "'no' is not true or false"),
    ],
)
def test_settings_that_are_not_computed_are_refused(model_dir, change, message):
    rewrite(model_dir, lambda c: c.update(change))
    with pytest.raises(ModelError, match=message):
        huggingface.load_params(model_dir)


def test_a_truncated_file_is_named(model_dir):
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read .* truncated"):
        huggingface.load_params(model_dir)


def test_missing_unknown_and_misshapen_tensors_are_named(model_dir):
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"1 tensors are missing, first model\.norm\.weight"):
        huggingface.load_params(model_dir)
    save_file({**tensors, "model.norm.weight": norm, "model.extra": norm}, path)
    with pytest.raises(ModelError, match=r"qwen2 has no tensor model\.extra"):
        huggingface.load_params(model_dir)
    save_file({**tensors, "model.norm.weight": norm[:5]}, path)
    with pytest.raises(ModelError, match=r"has shape \(5,\), config.json says \(32,\)"):
        huggingface.load_params(model_dir)


def test_an_export_never_overwrites(model_dir):
    params, card = huggingface.load_params(model_dir)
    with pytest.raises(ModelError, match="not empty"):
        huggingface.save_hf(params, card, model_dir)


def test_configs_survive_the_round_trip():
    for family in ("qwen2", "qwen3", "llama"):
        arch = Architecture(
            family,
            64,
            32,
            64,
            2,
            4,
            2,
            8,
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            norm_eps=1e-5,
        )
        assert from_hf_config(to_hf_config(arch)) == arch


def test_loading_never_holds_the_model_twice(tmp_path):
    """Peak of a loading process's own memory, which leaves out the pages of the mapped file."""
    program = """
import os, sys, threading, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
from manus_jax.models import huggingface

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)

huggingface.load_params(sys.argv[1])
start = anonymous()
thread = threading.Thread(target=watch)
thread.start()
params = jax.block_until_ready(huggingface.load_params(sys.argv[2])[0])
done = True
thread.join()
print(peak - start, sum(x.nbytes for x in jax.tree.leaves(params)))
"""
    for name, layers in (("small", 1), ("large", 60)):
        arch = Architecture("llama", 64, 256, 768, layers, 4, 4, 64)
        params = init_params(Transformer, arch, Compute(), 0)
        huggingface.save_hf(params, huggingface.new_card(arch, None), tmp_path / name)
    run = [sys.executable, "-c", program, str(tmp_path / "small"), str(tmp_path / "large")]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    peak, weights = map(int, out.split()[-2:])
    assert weights > 150e6
    # All weights once, and the largest stack (a quarter of them) while it is put on the device.
    assert peak < 1.5 * weights
