"""The update does not depend on the mesh, the micro-batches and the packing."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sequences import batch_of, packed_arrays, ragged_sequences, weighted

from manus_jax.algorithms.recipes import RECIPES, policy_loss
from manus_jax.config.settings import OptimizerSettings
from manus_jax.learner import objectives
from manus_jax.learner.mesh import MeshError, make_mesh, param_shardings, param_spec
from manus_jax.learner.optimizer import learning_rate, make_optimizer
from manus_jax.learner.update import accumulate, init_state, make_update, put_batch
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import AttentionKernel
from manus_jax.models.transformer import Compute, Critic, Transformer, abstract_model, init_params

ARCH = Architecture("qwen3", 64, 32, 64, 2, 8, 8, 8, qk_norm=True, initializer_range=0.2)


def on_mesh(mesh):
    """As training computes there."""
    return Compute(kernel=AttentionKernel("plain", mesh))


def policy_objective(recipe="grpo", compute=None):
    graphdef, _ = abstract_model(Transformer, ARCH, compute or Compute())
    recipe = RECIPES[recipe]
    return objectives.policy(
        graphdef, policy_loss(recipe), with_entropy="entropy" in recipe.loss_fields
    )


def gradient_of(objective, params, packed):
    return jax.jit(lambda p, b, n: accumulate(objective, p, b, n))(params, *packed)


def packed_batch(sequences, rows, length, mode="token-mean", capacity=1):
    return packed_arrays(weighted(batch_of(sequences), mode), rows, length, capacity)


def updated_params(sequences, rows, length, mesh_sizes, recipe="grpo", steps=1, remat="full"):
    """Parameters after real updates (plain SGD shows the gradient itself) on the given mesh."""
    devices = jax.devices()[: int(np.prod(mesh_sizes))]
    mesh = make_mesh(*mesh_sizes, devices=devices)
    compute = dataclasses.replace(on_mesh(mesh), remat=remat)
    _, shapes = abstract_model(Transformer, ARCH, compute)
    params = init_params(Transformer, ARCH, compute, 0, param_shardings(shapes, mesh))
    optimizer, in_place = optax.sgd(0.5), remat == "in_place"
    objective = policy_objective(recipe, compute)
    update = make_update(objective, optimizer, mesh, shapes, in_place=in_place)
    state = init_state(params, optimizer, mesh)
    packed = packed_batch(sequences, rows, length, RECIPES[recipe].aggregation)
    for _ in range(steps):
        state, metrics = update(state, *put_batch(*packed, mesh))
    assert float(metrics["grad_norm"]) > 1e-2
    return jax.device_get(state.params), {k: float(v) for k, v in metrics.items()}


@pytest.fixture(scope="module")
def one_device():
    return updated_params(ragged_sequences(), 8, 64, (1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)])
def test_every_mesh_gives_the_parameters_of_one_device(sizes, one_device):
    params, metrics = updated_params(ragged_sequences(), 8, 64, sizes)
    chex.assert_trees_all_close(params, one_device[0], atol=2e-6, rtol=2e-5)
    chex.assert_trees_all_close(metrics, one_device[1], rtol=1e-4)


@pytest.mark.slow
def test_gradients_are_summed_in_the_backward_pass_on_every_mesh(one_device):
    params, metrics = updated_params(ragged_sequences(), 8, 64, (2, 2, 2), remat="in_place")
    chex.assert_trees_all_close(params, one_device[0], atol=2e-6, rtol=2e-5)
    chex.assert_trees_all_close(metrics, one_device[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.bug("B22")
@pytest.mark.parametrize(("rows", "length"), [(1, 64), (2, 64), (4, 128)])
def test_every_micro_batching_gives_the_same_parameters(rows, length, one_device):
    params, metrics = updated_params(ragged_sequences(), rows, length, (1, 1, 1))
    chex.assert_trees_all_close(params, one_device[0], atol=2e-6, rtol=2e-5)
    chex.assert_trees_all_close(metrics, one_device[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ppo", "grpo", "dapo", "gspo", "cispo", "rloo"])
def test_packed_gradients_equal_unpacked_ones_over_the_whole_tree(recipe):
    mode = RECIPES[recipe].aggregation
    norm_constant = 50.0 if mode.endswith("norm") else None
    batch = weighted(batch_of(ragged_sequences(1)), mode, norm_constant)
    objective = policy_objective(recipe)
    params = init_params(Transformer, ARCH, Compute(), 0)
    grads = {}
    for name, groups in {
        "packed": [batch],
        "alone": [batch[n : n + 1] for n in range(len(batch))],
    }.items():
        total = jax.tree.map(jnp.zeros_like, params)
        run = jax.jit(lambda p, b, n: accumulate(objective, p, b, n)[0])
        for group in groups:
            total = jax.tree.map(jnp.add, total, run(params, *packed_arrays(group, 4, 64, 2)))
        grads[name] = total
    assert float(optax.tree.norm(grads["alone"])) > 1e-2
    chex.assert_trees_all_close(grads["packed"], grads["alone"], atol=2e-6, rtol=2e-5)


@pytest.mark.slow
def test_gradient_equals_a_naive_loss_on_padded_rows():
    """Against autodiff through full logits, one padded row per sample, no packing, no loop."""
    samples = ragged_sequences(2, count=5)
    batch = weighted(batch_of(samples))
    graphdef, _ = abstract_model(Transformer, ARCH, Compute(remat="none"))
    params = init_params(Transformer, ARCH, Compute(), 0)

    def naive(params):
        loss = 0.0
        ids = np.zeros((len(samples), 64), np.int32)
        for row, s in zip(ids, samples, strict=True):
            row[: len(s["input_ids"])] = s["input_ids"]
        positions = np.broadcast_to(np.arange(64, dtype=np.int32), ids.shape)
        all_logits = nnx.merge(graphdef, params)(ids, np.ones_like(ids), positions)
        for logits, s, weights in zip(
            all_logits, samples, batch.batch["loss_weights"], strict=True
        ):
            lp = jnp.take_along_axis(
                jax.nn.log_softmax(logits)[: len(s["input_ids"]) - 1],
                s["input_ids"][1:, None],
                axis=1,
            )[:, 0]
            ratio = jnp.exp(lp - s["old_log_probs"][1:])
            adv = s["advantages"][1:]
            surrogate = jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.28) * adv)
            w = weights[: len(s["input_ids"])][1:]
            weight = jnp.minimum(jnp.exp(s["old_log_probs"] - s["sampler_log_probs"]), 2.0)[1:]
            loss -= jnp.sum(w * surrogate * weight)
        return loss

    packed = packed_arrays(batch, 2, 64)
    ours, loss, _ = gradient_of(policy_objective("dapo"), params, packed)
    expected_loss, expected = jax.jit(jax.value_and_grad(naive))(params)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    chex.assert_trees_all_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_ten_steps_of_varying_data_compile_once():
    mesh = make_mesh(1, 2, 1, devices=jax.devices()[:2])
    _, shapes = abstract_model(Transformer, ARCH, Compute())
    params = init_params(Transformer, ARCH, Compute(), 0, param_shardings(shapes, mesh))
    optimizer = make_optimizer(learning_rate(1e-3, "cosine", 2, 10, 0.1), OptimizerSettings())
    update = make_update(policy_objective(compute=on_mesh(mesh)), optimizer, mesh, shapes)
    state = init_state(params, optimizer, mesh)
    for seed in range(10):
        packed = packed_batch(ragged_sequences(seed, count=3 + seed), 2, 64, capacity=6)
        state, _ = update(state, *put_batch(*packed, mesh))
    assert update._cache_size() == 1
    assert int(state.step) == 10 and int(state.skipped) == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nan_advantages", "endless_step"])
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(fault):
    mesh = make_mesh(devices=jax.devices()[:1])
    _, shapes = abstract_model(Transformer, ARCH, Compute())
    optimizer = optax.adam(0.1 if fault == "nan_advantages" else 1e30)
    update = make_update(policy_objective(), optimizer, mesh, shapes)
    state = init_state(init_params(Transformer, ARCH, Compute(), 0), optimizer, mesh)
    before = jax.tree.map(np.array, jax.device_get((state.params, state.opt_state)))
    packed = packed_batch(ragged_sequences(), 8, 64)
    if fault == "nan_advantages":
        packed[0]["advantages"][packed[0]["loss_mask"]] = np.nan
    state, metrics = update(state, *put_batch(*packed, mesh))
    chex.assert_trees_all_equal(jax.device_get((state.params, state.opt_state)), before)
    assert float(metrics["update_skipped"]) == 1 and int(state.skipped) == 1


@pytest.mark.slow
def test_the_critic_objective_learns_the_returns():
    mesh = make_mesh(devices=jax.devices()[:1])
    graphdef, shapes = abstract_model(Critic, ARCH, Compute())
    optimizer = optax.adam(3e-3)
    update = make_update(objectives.critic(graphdef, 1e6), optimizer, mesh, shapes)
    state = init_state(init_params(Critic, ARCH, Compute(), 0), optimizer, mesh)
    packed = packed_batch(ragged_sequences(count=4), 4, 64)
    losses = []
    for _ in range(30):
        state, metrics = update(state, *put_batch(*packed, mesh))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_remat_policies_and_entropy_leave_the_gradient_as_it_was():
    packed = packed_batch(ragged_sequences(3, count=4), 4, 64)
    params = init_params(Transformer, ARCH, Compute(), 0)
    grads = [
        gradient_of(policy_objective(compute=Compute(remat=r)), params, packed)[0]
        for r in ("none", "minimal", "attention", "full", "offload", "in_place")
    ]
    for other in grads[1:]:
        chex.assert_trees_all_close(other, grads[0], atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_summed_in_the_backward_pass_are_those_summed_after_it(dtype):
    packed = packed_batch(ragged_sequences(3, count=6), 2, 64, capacity=4)
    assert packed[1] > 1  # micro-batches
    params = init_params(Transformer, ARCH, Compute(), 0)
    after, in_place = (
        jax.jit(functools.partial(accumulate, policy_objective(compute=compute), in_place=own))(
            params, *packed
        )
        for own, compute in ((False, Compute(dtype)), (True, Compute(dtype, "in_place")))
    )
    chex.assert_trees_all_close(in_place, after, rtol=1e-6, atol=1e-7)


@pytest.mark.bug("B36")
def test_meshes_and_batches_that_do_not_fit_say_so():
    with pytest.raises(MeshError, match="needs 6 devices and there are 8"):
        make_mesh(2, 3, 1)
    with pytest.raises(MeshError, match="8 devices are not divisible by 3"):
        make_mesh(3, -1, 1)
    with pytest.raises(MeshError, match="only one"):
        make_mesh(-1, -1, 1)
    mesh = make_mesh(2, 4, 1)
    with pytest.raises(MeshError, match=r"6 rows .* data=2 x fsdp=4 = 8"):
        put_batch({"input_ids": np.zeros((1, 6, 8), np.int32)}, 0, mesh)
    with pytest.raises(MeshError, match="no sharding rule matches parameter 'backbone/extra'"):
        param_spec("backbone/extra", (8, 8), mesh)
    with pytest.raises(MeshError, match=r"dimension 1 of size 12 is not divisible by tensor=8"):
        param_spec("backbone/layers/q_proj", (2, 12, 32), make_mesh(1, 1, 8))


@pytest.mark.slow
@pytest.mark.bug("B21", "B22")
def test_schedules_by_hand():
    warm = learning_rate(1.0, "linear", 4, 14, 0.5)
    np.testing.assert_allclose([warm(i) for i in (0, 1, 3, 4)], [0.25, 0.5, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose([warm(9), warm(14)], [0.75, 0.5], rtol=1e-6)
    cosine = learning_rate(2.0, "cosine", 0, 10, 0.0)
    np.testing.assert_allclose([cosine(0), cosine(5), cosine(10)], [2.0, 1.0, 0.0], atol=1e-6)
