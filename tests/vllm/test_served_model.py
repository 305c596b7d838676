"""The type and the KV cache of a server, from the files of a model."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from manus_jax.vllm import served_model
from manus_jax.vllm.served_model import cpu_cache_bytes, weight_dtype

CONFIG = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1000,
}


def written(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "config",
    [{"dtype": "float32"}, {"torch_dtype": "float32"}, {"text_config": {"dtype": "float32"}}],
)
def test_the_type_of_the_weights_is_the_one_in_the_config(tmp_path, config):
    assert weight_dtype(written(tmp_path, config)) == "float32"


@pytest.mark.parametrize(
    ("kind", "name"), [(np.float32, "float32"), (ml_dtypes.bfloat16, "bfloat16")]
)
def test_without_a_type_in_the_config_the_tensors_have_it(tmp_path, kind, name):
    tensors = {"a": np.zeros(3, kind), "b": np.zeros((2, 2), kind), "c": np.zeros(1, np.float16)}
    save_file(tensors, written(tmp_path, {}) / "model.safetensors")
    assert weight_dtype(tmp_path) == name


def test_unknown_types_are_left_to_vllm(tmp_path):
    assert weight_dtype(written(tmp_path, {})) == "auto"
    (tmp_path / "model.safetensors").write_text("no such file")
    assert weight_dtype(tmp_path) == "auto"


def test_the_cache_has_room_for_all_slots_within_a_quarter_of_the_free_memory(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(served_model, "_free_memory", lambda: 4 << 30)
    model = written(tmp_path, CONFIG)
    # 100 slots of (3 + 1) pages of 128 tokens; 2 x 3 layers x 2 heads x 64 numbers of 4 bytes
    assert cpu_cache_bytes(model, "float32", 100, 300) == max(
        256 << 20, 100 * 4 * 128 * 2 * 3 * 2 * 64 * 4
    )
    of_positions = 300 * 9 * 128 * 2 * 3 * 2 * 64 * 4  # 1000 positions are 8 pages
    assert cpu_cache_bytes(model, "float32", 300, None) == of_positions > 256 << 20
    assert cpu_cache_bytes(model, "bfloat16", 600, None) == of_positions
    assert cpu_cache_bytes(model, "float32", 10_000, None) == 1 << 30
    assert cpu_cache_bytes(model, "float32", 1, 64) == 256 << 20
