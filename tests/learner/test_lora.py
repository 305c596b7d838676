"""Training adapters: the base does not change, meshes agree, and the reference is the base."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sequences import COLUMNS, batch_of, ragged_sequences

from manus_jax.algorithms.recipes import RECIPES, policy_loss
from manus_jax.config.commands import TrainConfig
from manus_jax.config.settings import (
    AlgorithmSettings,
    ComputeSettings,
    DataSettings,
    EngineSettings,
    EnvSettings,
    LoraSettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    RolloutSettings,
    TrainSettings,
    WarmStartSettings,
)
from manus_jax.learner import objectives
from manus_jax.learner.learner import BaseReference, Learner, LearnerSpec
from manus_jax.learner.mesh import make_mesh, param_shardings
from manus_jax.learner.packing import RowShape, add_packing
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import AttentionKernel
from manus_jax.models.loading import PolicySource
from manus_jax.models.lora import Lora, MergedArray, merged_params
from manus_jax.models.transformer import (
    Compute,
    Transformer,
    abstract_model,
    init_adapters,
    init_params,
)
from manus_jax.planning.compiling import lower_update
from manus_jax.training.learner_specs import split_shapes
from manus_jax.training.policies import build_learners

ARCH = Architecture("qwen3", 72, 32, 80, 2, 8, 8, 8, qk_norm=True, initializer_range=0.2)
LORA = Lora(4, 8.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def make_learner(sizes=(1, 1, 1), dtype="float32", lora=LORA):
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    compute = Compute(dtype, kernel=AttentionKernel("plain", mesh))
    graphdef, all_shapes = abstract_model(Transformer, ARCH, compute, lora)
    shapes, frozen = split_shapes(all_shapes, lora, dtype)
    spec = LearnerSpec(
        shapes,
        objectives.policy(graphdef, policy_loss(RECIPES["grpo"])),
        lambda p, batch: objectives.log_probs_of(graphdef, p, batch)[0],
        optax.sgd(0.5),
        COLUMNS,
        RowShape(8, 64),
        1,
        1,
        frozen=frozen,
        lora=lora,
    )
    base = init_params(Transformer, ARCH, Compute(), 0)
    base = jax.device_put(
        jax.tree.map(lambda x: x.astype(dtype), base), param_shardings(frozen[0], mesh)
    )
    placed = param_shardings(shapes, mesh)
    adapters = init_adapters(Transformer, ARCH, lora, 1, placed)
    # B is not zero, so that A has gradients.
    adapters = jax.tree.map(
        lambda x, s: jax.device_put(x + 0.02 * jnp.cos(jnp.arange(x.size).reshape(x.shape)), s),
        adapters,
        placed,
    )
    return Learner(adapters, spec, mesh, (base,))


def make_batch():
    return add_packing(batch_of(ragged_sequences()), 64)


@pytest.fixture(scope="module")
def on_one_device():
    learner = make_learner()
    metrics = learner.update(make_batch())
    return jax.device_get(learner.state.params), metrics


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 1, 8), (2, 2, 2)])
def test_every_mesh_gives_the_adapters_of_one_device(sizes, on_one_device):
    learner = make_learner(sizes)
    metrics = learner.update(make_batch())
    params, expected = on_one_device
    chex.assert_trees_all_close(jax.device_get(learner.state.params), params, atol=2e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_an_update_has_gradients_and_optimizer_state_of_the_adapters_only():
    learner = make_learner(dtype="bfloat16")
    before = jax.device_get(learner.frozen[0])
    old = jax.device_get(learner.state.params)
    learner.update(make_batch())
    assert {x.dtype.name for x in jax.tree.leaves(learner.frozen)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(learner.state.params)} == {"float32"}
    chex.assert_trees_all_equal(jax.device_get(learner.frozen[0]), before)
    adamw = jax.eval_shape(optax.adamw(1e-3).init, learner.spec.shapes)
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    per_layer = 4 * sum(sum(ARCH.layer_shapes[name]) for name in LORA.targets)
    assert count(learner.state.params) == 2 * per_layer
    assert count(adamw) == 2 * 2 * per_layer + 1
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), learner.state.params, old)
    assert all(jax.tree.leaves(changed))


@pytest.mark.slow
def test_the_compiled_update_has_no_gradient_of_a_base_matrix():
    learner = make_learner(lora=Lora(4, 8.0, ("v_proj",)))
    text = lower_update(learner.spec, learner.mesh).compile().as_text()
    products = set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))
    a = ARCH
    assert f"{learner.spec.lora.rank},{a.hidden_size}" in products  # of A
    wide, narrow, words = a.intermediate_size, a.hidden_size, a.vocab_size
    shapes = ((wide, narrow), (2 * wide, narrow), (narrow, wide), (words, narrow))
    assert not products & {f"{out},{inputs}" for out, inputs in shapes}


@pytest.mark.slow
def test_log_probs_are_those_of_the_merged_model():
    learner, batch = make_learner(), make_batch()
    base, adapters = learner.frozen[0], learner.state.params
    merged = merged_params(base, adapters, LORA)
    graphdef, shapes = abstract_model(Transformer, ARCH, Compute())
    spec = LearnerSpec(
        shapes,
        objectives.policy(graphdef, policy_loss(RECIPES["grpo"])),
        lambda p, batch: objectives.log_probs_of(graphdef, p, batch)[0],
        optax.sgd(0.5),
        COLUMNS,
        RowShape(8, 64),
        1,
        1,
    )
    full = Learner(merged, spec, learner.mesh)
    ours = learner.forward(batch, "log_probs").batch["log_probs"]
    theirs = full.forward(batch, "log_probs").batch["log_probs"]
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    plain = make_learner()
    assert (
        np.abs(
            ours - plain.forward(batch, "x", BaseReference(plain.spec, plain.mesh)).batch["x"]
        ).max()
        > 0.01
    )
    lazily = learner.merged()["backbone"]["layers"]["up_proj"]
    assert isinstance(lazily, MergedArray)
    np.testing.assert_allclose(
        lazily.layer(1), merged["backbone"]["layers"]["up_proj"][1], atol=1e-6
    )


def train_config(recipe, **algorithm):
    return TrainConfig(
        train=TrainSettings(run_dir="runs/x", batch_size=1, group_size=2),
        algorithm=AlgorithmSettings(recipe=recipe, **algorithm),
        env=EnvSettings(names=("maze",)),
        rollout=RolloutSettings(max_total_tokens=64),
        engine=EngineSettings(),
        data=DataSettings(max_length=64, rows=2),
        model=ModelSettings(path="model"),
        scratch=None,
        warm_start=WarmStartSettings(),
        optimizer=OptimizerSettings(),
        mesh=MeshSettings(),
        compute=ComputeSettings(),
        lora=LoraSettings(rank=4),
    )


class Card:
    architecture = ARCH


@pytest.mark.slow
def test_the_critic_and_the_reference_share_the_arrays_of_the_base():
    params = init_params(Transformer, ARCH, Compute(), 0)
    source = PolicySource(Card(), None, lambda shardings, dtype: params, lambda: params)
    mesh = make_mesh(devices=jax.devices()[:1])
    config = train_config("ppo", kl_placement="reward", kl_coef=0.1)
    learners, reference = build_learners(config, RECIPES["ppo"], source, mesh)
    policy, critic = learners["policy"], learners["critic"]
    ours, theirs = policy.frozen[0]["backbone"], critic.frozen[0]["backbone"]
    assert all(map(lambda x, y: x is y, jax.tree.leaves(ours), jax.tree.leaves(theirs)))
    assert set(critic.state.params) == {"backbone", "value_head"}
    batch = make_batch()
    start = policy.forward(batch, "x").batch["x"]  # B is zero before the first update
    policy.update(batch)
    moved = policy.forward(batch, "x").batch["x"]
    assert isinstance(reference, BaseReference)
    np.testing.assert_array_equal(policy.forward(batch, "x", reference).batch["x"], start)
    assert (moved != start).any()
