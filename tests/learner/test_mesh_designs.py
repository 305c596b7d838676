"""A learner that does not fit the mesh is refused before anything is allocated."""

import dataclasses

import jax
import pytest

from manus_jax.config.commands import TrainConfig
from manus_jax.config.settings import (
    AlgorithmSettings,
    ComputeSettings,
    DataSettings,
    EngineSettings,
    EnvSettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    RolloutSettings,
    TrainSettings,
    WarmStartSettings,
)
from manus_jax.learner.mesh import MeshError, make_mesh
from manus_jax.models.architecture import Architecture
from manus_jax.training.learner_specs import critic_spec, make_recipe, policy_spec

QWEN_7B = Architecture("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True)


def config(rows=8, length=1024, attention="plain", **mesh):
    return TrainConfig(
        train=TrainSettings(run_dir="runs/never"),
        algorithm=AlgorithmSettings(recipe="ppo"),
        env=EnvSettings(names=("maze",)),
        rollout=RolloutSettings(),
        engine=EngineSettings(),
        data=DataSettings(rows=rows, max_length=length),
        model=ModelSettings(),
        scratch=None,
        warm_start=WarmStartSettings(),
        optimizer=OptimizerSettings(),
        mesh=MeshSettings(**mesh),
        compute=ComputeSettings(attention=attention),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config(tensor=8), "28 heads are not divisible by tensor=8"),
        (config(rows=6), "6 rows per micro-batch are not divisible by fsdp=8"),
        (config(length=1001, sequence=2), "row length 1001 is not divisible by sequence=2"),
        (
            config(attention="splash", length=640, sequence=2),
            "row length 640 is not divisible by 128 x sequence=2 = 256",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_for_policy_and_critic(settings, message):
    mesh = make_mesh(**dataclasses.asdict(settings.mesh))
    before = len(jax.live_arrays())
    with pytest.raises(MeshError, match=message):
        policy_spec(settings, make_recipe(settings.algorithm), QWEN_7B, mesh)
    with pytest.raises(MeshError, match=message):
        critic_spec(settings, QWEN_7B, mesh)
    assert len(jax.live_arrays()) == before


def test_a_learner_that_fits_is_designed_without_an_array():
    settings = config(fsdp=-1, tensor=2, sequence=2)
    mesh = make_mesh(**dataclasses.asdict(settings.mesh))
    before = len(jax.live_arrays())
    design = policy_spec(settings, make_recipe(settings.algorithm), QWEN_7B, mesh)
    assert design.shapes["backbone"]["embed"].shape == (152064, 3584)
    assert len(jax.live_arrays()) == before
