"""The configs for GPUs alone: who gets which, and that learner and servers fit their shares."""

import dataclasses
import os
import re
from pathlib import Path

import jax
import pytest

from manus_jax import train
from manus_jax.learner.mesh import check_batch, make_mesh
from manus_jax.training.learner_specs import make_recipe

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/gpu_only_*.gin"))
ONE_MACHINE = [p for p in CONFIGS if "textcraft" in p.name and "nodes" not in p.name]
PARAMS = 7.62e9  # Qwen2.5-7B: 28 layers, 4 key-value heads of 128
GPU = 80e9


class Reached(Exception):
    """The command has read its settings."""


def settings_of(path, monkeypatch):
    def reached(config, *_):
        raise Reached(config)

    monkeypatch.setattr(train, "open_trainer", reached)
    with pytest.raises(Reached) as caught:
        train.main([f"--gin_file={path}"])
    return caught.value.args[0]


def held_by_learner(config):
    """Bytes of float32 on all of the learner's GPUs: weights, gradients, two moments each."""
    recipe = make_recipe(config.algorithm)
    reference = recipe.needs_reference and config.algorithm.reference == "device"
    return PARAMS * (16 * (1 + recipe.needs_critic) + 4 * reference)


def test_there_is_one_for_grpo_one_for_ppo_and_one_for_several_machines():
    names = {p.stem for p in CONFIGS}
    assert names == {
        "gpu_only_quickstart",
        "gpu_only_grpo_textcraft",
        "gpu_only_ppo_textcraft",
        "gpu_only_grpo_textcraft_nodes",
    }


@pytest.mark.parametrize("path", ONE_MACHINE, ids=lambda p: p.name)
def test_eight_gpus_are_four_that_learn_and_four_that_serve(path, monkeypatch):
    config = settings_of(path, monkeypatch)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"
    options = config.engine_settings
    assert options.gpus == ("4", "5", "6", "7") and options.tensor_parallel == 1
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=jax.devices()[:4])
    check_batch(config.data.rows, config.data.max_length, mesh)
    assert config.data.max_length % 128 == 0  # the GPU's kernel takes whole blocks


@pytest.mark.parametrize("path", ONE_MACHINE, ids=lambda p: p.name)
def test_learner_and_servers_fit_and_the_header_says_how_much_they_take(path, monkeypatch):
    config = settings_of(path, monkeypatch)
    options = config.engine_settings
    share = held_by_learner(config) / 4
    length, hidden = config.data.max_length, 3584
    layer_inputs = config.data.rows // 4 * 28 * length * hidden * 2  # kept by full remat
    assert share + layer_inputs + 5e9 < GPU * options.learner_memory_fraction
    assert f"{share / 1e9:.0f} GB of each of the learner's" in " ".join(
        path.read_text().replace("#", "").split()
    )
    a_token = 28 * 4 * 128 * 2 * 2  # keys and values in bfloat16
    cache = config.engine.slots // 4 * config.rollout.max_total_tokens * a_token
    assert 2 * PARAMS + cache < GPU * options.gpu_memory_utilization
    assert config.rollout.max_in_flight <= config.engine.slots
    assert config.engine.dtype == "bfloat16"


def test_several_machines_hold_a_copy_each_and_find_their_servers_by_file(monkeypatch):
    config = settings_of(ROOT / "configs/gpu_only_grpo_textcraft_nodes.gin", monkeypatch)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"  # all of them learn
    options = config.engine_settings
    assert options.address_file and options.weights_dir and not options.servers
    assert config.mesh.data == config.mesh.slices == 2
    assert config.data.rows % (2 * 8) == 0
    assert round(held_by_learner(config) / 8 / 1e9) == 19


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_the_header_gives_command_hardware_and_what_has_not_been_run(path):
    header = path.read_text().partition("\n\n")[0]
    assert re.search(rf"python -m manus_jax\.train --gin_file=configs/{path.name}$", header, re.M)
    assert "# Hardware: " in header and "# Expect: " in header
    assert "not run on that hardware" in " ".join(header.replace("#", "").split())
