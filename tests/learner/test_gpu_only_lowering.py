"""The updates of the configs for GPUs, lowered for CUDA with the attention that a GPU takes.

The config's own settings: recipe, lengths, rows, mesh and remat. Only the model is smaller, as the
program is the same for all sizes.
"""

import dataclasses
from pathlib import Path

import jax
import pytest

from manus_jax import train
from manus_jax.learner.mesh import make_mesh
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import pick_implementation
from manus_jax.planning.compiling import lower_update
from manus_jax.training.learner_specs import critic_spec, make_recipe, policy_spec

ROOT = Path(__file__).parents[2]
# Like Qwen2.5-7B: seven query heads of 128 for each key-value head, with biases.
ARCH = Architecture("qwen2", 512, 256, 512, 2, 14, 2, 128, qkv_bias=True)
KERNEL = "__gpu$xla.gpu.triton"


class Reached(Exception):
    """The command has read its settings."""


def settings_of(recipe, hardware, monkeypatch):
    """What training would run with, and the attention of a GPU, which this machine has not."""

    def reached(config, *_):
        raise Reached(config)

    for variable in ("CUDA_DEVICE_ORDER", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(train, "open_trainer", reached)
    with pytest.raises(Reached) as caught:
        files = ("envs/textcraft", f"recipes/{recipe}", f"hardware/{hardware}")
        train.main([f"--gin_file={ROOT}/configs/{file}.gin" for file in files])
    config = caught.value.args[0]
    assert config.compute.attention == "auto"
    compute = dataclasses.replace(config.compute, attention=pick_implementation("cuda"))
    return dataclasses.replace(config, compute=compute)


def kernels(design, mesh):
    """How many calls of the attention kernel are in the update: forward, its rerun, backward."""
    text = lower_update(design, mesh, platform="cuda").as_text()
    assert (
        f"{design.row_shape.rows}x{design.row_shape.length}xi32" in text
    )  # the config's own batch
    return text.count(KERNEL)


@pytest.mark.slow
@pytest.mark.parametrize("hardware, devices", [("gpus_one_host", 4), ("gpus_many_hosts", 8)])
def test_the_policy_update_takes_the_gpus_kernel_forward_and_backward(
    hardware, devices, monkeypatch
):
    config = settings_of("grpo", hardware, monkeypatch)
    sizes = {**dataclasses.asdict(config.mesh), "slices": 1}  # machines are not to be seen here
    mesh = make_mesh(**sizes, devices=jax.devices()[:devices])
    recipe = make_recipe(config.algorithm)
    design = policy_spec(config, recipe, ARCH, mesh)
    assert kernels(design, mesh) >= 3


@pytest.mark.slow
def test_the_update_of_the_critic_does_too(monkeypatch):
    config = settings_of("ppo", "gpus_one_host", monkeypatch)
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=jax.devices()[:4])
    recipe = make_recipe(config.algorithm)
    assert recipe.needs_critic
    policy = policy_spec(config, recipe, ARCH, mesh)
    assert kernels(policy, mesh) >= 3
    assert kernels(critic_spec(config, ARCH, mesh), mesh) >= 3
