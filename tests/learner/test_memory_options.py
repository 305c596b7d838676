"""Options that save memory: each against the float32 default."""

import chex
import jax
import numpy as np
import optax
import pytest
from sequences import COLUMNS, batch_of, ragged_sequences

from manus_jax.algorithms.recipes import RECIPES, policy_loss
from manus_jax.config.binding import ConfigError, may_change
from manus_jax.config.settings import OptimizerSettings
from manus_jax.learner import objectives
from manus_jax.learner.learner import Learner, LearnerSpec, Reference
from manus_jax.learner.mesh import make_mesh, param_shardings
from manus_jax.learner.optimizer import decayed, learning_rate, make_optimizer
from manus_jax.learner.packing import RowShape, add_packing
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import AttentionKernel
from manus_jax.models.transformer import Compute, Transformer, abstract_model, init_params
from manus_jax.training.checkpoints import Checkpoints

ARCH = Architecture("qwen3", 64, 32, 64, 1, 4, 4, 8, qk_norm=True, initializer_range=0.2)
RATE = 1e-3
BATCH = add_packing(batch_of(ragged_sequences(count=8)), 64)


def make_learner(dtype="float32", **settings):
    mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
    compute = Compute(dtype, kernel=AttentionKernel("plain", mesh))
    graphdef, shapes = abstract_model(Transformer, ARCH, compute)
    opt = OptimizerSettings(lr=RATE, **settings)
    spec = LearnerSpec(
        shapes,
        objectives.policy(graphdef, policy_loss(RECIPES["grpo"])),
        lambda p, batch: objectives.log_probs_of(graphdef, p, batch)[0],
        make_optimizer(learning_rate(RATE, "constant", 0, 1, 0.0), opt),
        COLUMNS,
        RowShape(4, 64),
        2,
        2,
        optimizer_on_host=opt.state == "host",
    )
    params = init_params(Transformer, ARCH, compute, 0, param_shardings(shapes, mesh))
    return Learner(params, spec, mesh)


def kinds(state):
    """The memory kinds of the optimizer's arrays, without its counters."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}


@pytest.mark.slow
def test_a_state_in_host_memory_gives_the_same_bits_and_restores_from_either_place(tmp_path):
    device, host = make_learner(), make_learner(state="host")
    for learner in (device, host):
        for _ in range(2):
            learner.update(BATCH)
    assert kinds(host.state) == {"pinned_host"} and kinds(device.state) == {"device"}
    chex.assert_trees_all_equal(device.state, host.state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"policy": host.state}, {})
    checkpoints.wait()
    restored, _ = checkpoints.restore(1, {"policy": device.abstract_state()})
    assert kinds(restored["policy"]) == {"device"}
    checkpoints.save(2, restored, {})
    checkpoints.wait()
    restored, _ = checkpoints.restore(2, {"policy": host.abstract_state()})
    assert kinds(restored["policy"]) == {"pinned_host"}
    chex.assert_trees_all_equal(restored["policy"], host.state)
    checkpoints.close()


@pytest.mark.slow
def test_a_bfloat16_first_moment_changes_updates_by_its_rounding_only():
    exact, rounded = make_learner(), make_learner(moment_dtype="bfloat16")
    steps = 3
    for learner in (exact, rounded):
        for _ in range(steps):
            learner.update(BATCH)
    adam = next(
        s for s in jax.tree.leaves(rounded.state.opt_state, is_leaf=_is_adam) if _is_adam(s)
    )
    assert {x.dtype.name for x in jax.tree.leaves(adam.mu)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(adam.nu)} == {"float32"}
    # A step is about the learning rate; rounding changes the moment by 2^-9 of itself, and with
    # b1 = 0.9 up to ten roundings add up.
    bound = steps * RATE * 10 * 2**-9
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), *_params(exact, rounded))
    assert 0 < max(jax.tree.leaves(gaps)) < bound


def _is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


def _params(*learners):
    return [jax.device_get(learner.state.params) for learner in learners]


def test_adafactor_is_that_of_optax_with_decoupled_decay():
    rng = np.random.default_rng(0)
    params = {"layers": {"up_proj": rng.normal(size=(2, 256, 128)).astype(np.float32)}}
    grads = jax.tree.map(lambda x: 1e-3 * rng.normal(size=x.shape).astype(np.float32), params)
    settings = OptimizerSettings(name="adafactor", weight_decay=0.1)
    ours = make_optimizer(optax.constant_schedule(RATE), settings)
    theirs = optax.adafactor(
        RATE,
        multiply_by_parameter_scale=False,
        weight_decay_rate=0.1 * RATE,  # theirs is not multiplied by the learning rate
        weight_decay_mask=decayed,
    )
    mine, state = params, ours.init(params)
    other, other_state = params, theirs.init(params)
    for _ in range(3):
        updates, state = ours.update(grads, state, mine)
        mine = optax.apply_updates(mine, updates)
        updates, other_state = theirs.update(grads, other_state, other)
        other = optax.apply_updates(other, updates)
    chex.assert_trees_all_close(mine, other, rtol=1e-6, atol=1e-5 * RATE)
    elements = sum(x.size for x in jax.tree.leaves(state))
    assert elements < 0.02 * params["layers"]["up_proj"].size


def test_settings_that_adafactor_does_not_read_are_an_error():
    with pytest.raises(ConfigError, match=r"'adafactor' does not read optimizer\.b1"):
        OptimizerSettings(name="adafactor", b1=0.5)


def test_only_options_that_do_not_change_the_result_may_change_on_resume():
    assert may_change("optimizer.state") and may_change("algorithm.reference")
    for name in ("optimizer.name", "optimizer.moment_dtype", "algorithm.reference_dtype"):
        assert not may_change(name)


@pytest.fixture(scope="module")
def learners():
    return make_learner(), make_learner("bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
def test_a_bfloat16_reference_is_the_rounded_policy(on_host, learners):
    learner, compute = learners
    reference = Reference(learner.state.params, on_host, "bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(reference.params())} == {"bfloat16"}
    rounded = learner.forward(BATCH, "ref_log_probs", reference).batch["ref_log_probs"]
    exact = learner.forward(BATCH, "ref_log_probs").batch["ref_log_probs"]
    # Weights are rounded to 2^-9 of themselves; logits, and so log-probs, are of order 10.
    gap = np.abs(rounded - exact).max()
    assert 0 < gap < 10 * 2**-7
    with_float32 = compute.forward(BATCH, "ref_log_probs").batch["ref_log_probs"]
    with_bfloat16 = compute.forward(BATCH, "ref_log_probs", reference).batch["ref_log_probs"]
    # A bfloat16 model casts its weights in any case.
    np.testing.assert_array_equal(with_bfloat16, with_float32)
