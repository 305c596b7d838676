"""Configs for hosts with GPUs only: how GPUs are split, and that learner and servers fit."""

import dataclasses
import os
from pathlib import Path

import jax
import pytest

from manus_jax import train
from manus_jax.learner.mesh import check_batch, make_mesh
from manus_jax.training.learner_specs import make_recipe

ROOT = Path(__file__).parents[2]
ON_HOST = ("algorithm.reference = 'host'",)
# Recipe, additional bindings, and the GB that each of the learner's GPUs holds.
ONE_HOST = [("grpo", (), 38), ("ppo", ON_HOST, 61)]
PARAMS = 7.62e9  # Qwen2.5-7B: 28 layers, 4 key-value heads of 128
GPU = 80e9


class Reached(Exception):
    """The command has read its settings."""


def settings_of(recipe, hardware, monkeypatch, params=()):
    def reached(config, *_):
        raise Reached(config)

    monkeypatch.setattr(train, "open_trainer", reached)
    files = ("envs/textcraft", f"recipes/{recipe}", f"hardware/{hardware}")
    with pytest.raises(Reached) as caught:
        train.main(
            [
                *(f"--gin_file={ROOT}/configs/{file}.gin" for file in files),
                *(f"--gin_param={param}" for param in params),
            ]
        )
    return caught.value.args[0]


def held_by_learner(config):
    """Bytes of float32 on all of the learner's GPUs: weights, gradients, two moments each."""
    recipe = make_recipe(config.algorithm)
    reference = recipe.needs_reference and config.algorithm.reference == "device"
    return PARAMS * (16 * (1 + recipe.needs_critic) + 4 * reference)


@pytest.mark.parametrize("recipe, params, held", ONE_HOST)
def test_eight_gpus_are_four_that_learn_and_four_that_serve(recipe, params, held, monkeypatch):
    config = settings_of(recipe, "gpus_one_host", monkeypatch, params)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"
    options = config.engine_settings
    assert options.gpus == ("4", "5", "6", "7") and options.tensor_parallel == 1
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=jax.devices()[:4])
    check_batch(config.data.rows, config.data.max_length, mesh)
    assert config.data.max_length % 128 == 0  # the GPU's kernel takes whole blocks


@pytest.mark.parametrize("recipe, params, held", ONE_HOST)
def test_learner_and_servers_fit(recipe, params, held, monkeypatch):
    config = settings_of(recipe, "gpus_one_host", monkeypatch, params)
    options = config.engine_settings
    share = held_by_learner(config) / 4
    tokens, hidden = config.data.rows * config.data.max_length // 4, 3584
    layer_inputs = 28 * tokens * hidden * 2  # kept by full remat
    assert share + layer_inputs + 5e9 < GPU * options.learner_memory_fraction
    assert round(share / 1e9) == held
    a_token = 28 * 4 * 128 * 2 * 2  # keys and values in bfloat16
    cache = config.engine.slots // 4 * config.rollout.max_total_tokens * a_token
    assert 2 * PARAMS + cache < GPU * options.gpu_memory_utilization
    assert config.rollout.max_in_flight <= config.engine.slots
    assert config.engine.dtype == "bfloat16"


def test_several_hosts_hold_a_copy_each_and_find_their_servers_by_file(monkeypatch):
    config = settings_of("grpo", "gpus_many_hosts", monkeypatch)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"  # all of them learn
    options = config.engine_settings
    assert options.address_file and options.weights_dir and not options.servers
    assert config.mesh.data == config.mesh.slices == 2
    assert config.data.rows == 2 * 8 // config.mesh.sequence
    assert round(held_by_learner(config) / 8 / 1e9) == 19
