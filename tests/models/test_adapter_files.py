"""Adapters of other programs and damaged ones: those that cannot be applied are refused."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from manus_jax.files import write_checksums
from manus_jax.models import adapter_files, huggingface, loading
from manus_jax.models.adapter_files import Adaptation
from manus_jax.models.architecture import Architecture, ModelError
from manus_jax.models.lora import Lora
from manus_jax.models.orbax_params import CheckpointError

ARCH = Architecture("qwen3", 64, 32, 48, 2, 4, 2, 8, qk_norm=True)
LORA = Lora(4, 8.0, ("q_proj", "up_proj"))
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def adapter(tmp_path):
    rng = np.random.default_rng(0)
    shapes = LORA.layer_shapes(ARCH).items()
    layers = {name: rng.standard_normal((2, *shape), np.float32) for name, shape in shapes}
    directory = tmp_path / "adapter"
    adaptation = Adaptation(LORA, "/base", "0" * 32)
    adapter_files.save_adapter(
        {"backbone": {"layers": layers}}, adaptation, tmp_path, ARCH, directory
    )
    return directory


def read(directory):
    return adapter_files.read_adapter(
        directory, adapter_files.read_adaptation(directory).lora, ARCH
    )


def as_of_another_program(adapter, weights=None, **config):
    for name in ("SHA256SUMS", "base_model.json"):
        (adapter / name).unlink()
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if weights is not None:
        changed = {name: weights(x) for name, x in load_file(adapter / WEIGHTS).items()}
        save_file(changed, adapter / WEIGHTS)


def test_every_flipped_bit_is_found_in_every_file(adapter):
    read(adapter)
    rng = np.random.default_rng(0)
    for file in sorted(adapter.iterdir()):
        written = file.read_bytes()
        for bit in rng.integers(0, 8 * len(written), 12):
            changed = bytearray(written)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            with pytest.raises(ModelError):
                read(adapter)
        file.write_bytes(written)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_of_half_precision_are_read(adapter, dtype):
    as_of_another_program(adapter, lambda x: x.astype(dtype))
    assert np.isfinite(read(adapter)["backbone"]["layers"]["q_proj_lora_a"]).all()


@pytest.mark.parametrize(
    "weights",
    [
        lambda x: np.full_like(x, np.nan),
        lambda x: x / np.float32(0),
        lambda x: x.astype(np.int32),
        lambda x: x > 0,
        lambda x: x.astype(np.float64),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_weights_that_are_not_finite_floats_are_refused(adapter, weights):
    as_of_another_program(adapter, weights)
    with pytest.raises(ModelError, match=r"lora_[AB]\.weight has (the type|a value that)"):
        read(adapter)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"lora_alpha": float("nan")}, "lora_alpha = nan must be finite"),
        ({"lora_alpha": float("inf")}, "lora_alpha = inf must be finite"),
        ({"lora_alpha": 10**400}, "lora_alpha = 1000"),
        ({"lora_alpha": "8"}, "lora_alpha = '8' must be a number"),
        ({"r": 0}, "r = 0 must be at least 1"),
        ({"r": True}, "r = True must be a number"),
        ({"r": 10**12}, "r = 1000000000000 must be at most"),
        ({"base_model_name_or_path": ""}, "is not a path"),
        ({"base_model_name_or_path": "a\0b"}, "NUL"),
        ({"base_model_name_or_path": "x" * 5000}, "5000 characters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is set"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
    ],
)
def test_a_configuration_that_cannot_be_applied_is_refused(adapter, config, problem):
    as_of_another_program(adapter, **config)
    with pytest.raises(ModelError) as caught:
        read(adapter)
    assert problem in str(caught.value) and len(str(caught.value)) < 500


def test_a_pipe_in_the_place_of_the_weights_is_refused(adapter):
    as_of_another_program(adapter)
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)
    with pytest.raises(ModelError, match="it is not a file"):
        read(adapter)


@pytest.mark.parametrize("base", [".", "adapter", "other"])
def test_an_adapter_is_not_its_own_base(adapter, monkeypatch, base):
    monkeypatch.chdir(adapter.parent if base != "." else adapter)
    as_of_another_program(adapter, base_model_name_or_path=base)
    if base == "other":
        (adapter.parent / base).symlink_to("adapter")
    with pytest.raises(ModelError, match="itself as its base model"):
        loading.from_path(adapter)


@pytest.mark.parametrize(
    ("old", "new"), [("0000", "0001"), ("/base", "/bass"), ('"rank": 4', '"rank": 5'), ("{", "[")]
)
def test_damage_to_the_adapter_item_of_a_checkpoint_is_reported(tmp_path, old, new):
    huggingface.new_card(ARCH, None).save(tmp_path / "model")
    step = tmp_path / "checkpoints" / "3"
    (step / "lora").mkdir(parents=True)
    described = step / "lora" / "metadata"
    described.write_text(json.dumps(Adaptation(LORA, "/base", "0" * 32).to_json()))
    write_checksums(step)
    with pytest.raises(ModelError, match=r"the base model of .* is not at /base"):
        loading.from_path(tmp_path)
    described.write_text(described.read_text().replace(old, new, 1))
    with pytest.raises(CheckpointError, match="metadata does not match"):
        loading.from_path(tmp_path)
