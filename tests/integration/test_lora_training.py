"""Training with LoRA: checkpoints and exports of adapters, exact resume, and the base it needs."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_training import arguments

from manus_jax import evaluate, sft, train
from manus_jax.files import CHECKSUMS
from manus_jax.models import conversion
from manus_jax.models.loading import from_path
from manus_jax.models.orbax_params import CheckpointError

LORA = ("lora.rank = 3", "lora.alpha = 6", "train.val_before_train = False")
PPO = ("algorithm.recipe = 'ppo'", "algorithm.kl_placement = 'reward'", "algorithm.kl_coef = 0.1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("lora") / "run"
    steps = ("train.total_steps = 2", "lora.export_merged = True")
    train.main(arguments(run, *LORA, *PPO, *steps))
    return run


def test_checkpoints_have_the_adapters_and_the_export_is_for_the_warm_start(finished):
    adapter = finished / "export/2"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6)
    assert config["base_model_name_or_path"] == str(finished / "warm_start/export/2")
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert len(tensors) == 7 * 2  # one layer
    assert any(x.any() for name, x in tensors.items() if "lora_B" in name)
    item = json.loads((finished / "checkpoints/2/lora/metadata").read_text())
    assert item["base"] == "warm_start/export/2" and len(item["fingerprint"]) == 32
    stored = json.loads((finished / "checkpoints/2/params/_METADATA").read_text())
    assert all("lora" in name for name in stored["tree_metadata"])
    critic = json.loads((finished / "checkpoints/2/critic_params/_METADATA").read_text())
    assert any("value_head" in name for name in critic["tree_metadata"])
    assert not any("embed" in name for name in critic["tree_metadata"])


def test_the_adapter_the_checkpoint_and_the_merged_export_are_one_model(finished, tmp_path):
    assert_merged(finished, finished / "warm_start/export/2")
    merged = load_file(finished / "export/2-merged/model.safetensors")
    conversion.to_hf(finished, tmp_path / "hf")
    for name, tensor in load_file(tmp_path / "hf/model.safetensors").items():
        np.testing.assert_allclose(tensor, merged[name], atol=1e-6)
    opened = from_path(finished / "export/2").open()
    read = opened["backbone"]["layers"]["down_proj"].read((0,))
    np.testing.assert_allclose(read, merged["model.layers.0.mlp.down_proj.weight"], atol=1e-6)


def test_an_adapter_plays(finished, tmp_path):
    evaluate.main(
        [
            f"--gin_param=evaluate.policies = ['{finished / 'export/2'}']",
            f"--gin_param=evaluate.out_dir = '{tmp_path}'",
            "--gin_param=evaluate.tasks_per_env = 2",
            "--gin_param=env.names = ['maze']",
            "--gin_param=rollout.max_turns = 2",
            "--gin_param=rollout.max_tokens_per_turn = 8",
            "--gin_param=rollout.max_total_tokens = 512",
        ]
    )


def test_a_resumed_run_ends_with_the_same_adapter_and_refuses_another_base(finished, tmp_path):
    run = tmp_path / "run"
    steps = lambda n: arguments(run, *LORA, *PPO, f"train.total_steps = {n}")
    train.main(steps(1))
    shutil.rmtree(run / "export")
    train.main(steps(2))
    name = "export/2/adapter_model.safetensors"
    assert (run / name).read_bytes() == (finished / name).read_bytes()

    base = run / "warm_start/export/2"
    weights = base / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 0x10  # in the exponent of the last number's upper half
    weights.write_bytes(content)
    (base / CHECKSUMS).unlink()
    with pytest.raises(CheckpointError, match=r"were trained on warm_start/export/2 .*same base"):
        train.main(steps(3))
    with pytest.raises(ValueError, match="was trained on another model"):
        conversion.to_hf(run, tmp_path / "hf")


def test_a_given_model_is_warm_started_with_adapters_that_are_merged(finished, tmp_path):
    run, base = tmp_path / "run", finished / "warm_start/export/2"
    train.main(arguments(run, *LORA, f"model.path = '{base}'", "train.total_steps = 1"))
    assert_merged(run / "warm_start", base)
    config = json.loads((run / "export/1/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run / "warm_start/export/2-merged")


def test_sft_trains_adapters(finished, tmp_path):
    run, base = tmp_path / "run", finished / "warm_start/export/2"
    own = (
        f"model.path = '{base}'",
        f"sft.run_dir = '{run}'",
        "sft.total_steps = 2",
        "sft.batch_size = 4",
        f"data.train_files = ['{finished / 'warm_start/traces.jsonl'}']",
        "data.max_length = 512",
        "data.rows = 8",
        "data.overlong = 'cut'",
        "lora.rank = 3",
        "lora.alpha = 6",
        "lora.export_merged = True",
    )
    sft.main([f"--gin_param={binding}" for binding in own])
    assert_merged(run, base)


def assert_merged(run, base):
    """`export/2-merged` is the base with the adapters of `export/2`, which are not zero."""
    before = load_file(base / "model.safetensors")
    after = load_file(run / "export/2-merged/model.safetensors")
    adapter = load_file(run / "export/2/adapter_model.safetensors")
    for name, tensor in after.items():
        prefix, change = f"base_model.model.{name.removesuffix('weight')}", 0.0
        if f"{prefix}lora_A.weight" in adapter:
            b, a = (adapter[f"{prefix}lora_{side}.weight"] for side in "BA")
            assert b.any()
            change = 2.0 * (b @ a)
        np.testing.assert_allclose(tensor, before[name] + change, atol=1e-6)
