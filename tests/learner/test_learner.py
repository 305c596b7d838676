"""A learner takes packed batches of any size; splitting the work does not change the result."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sequences import COLUMNS, batch_of, ragged_sequences

from manus_jax.algorithms.recipes import RECIPES, policy_loss
from manus_jax.data_proto import DataProto
from manus_jax.learner import objectives
from manus_jax.learner.learner import Learner, LearnerSpec
from manus_jax.learner.mesh import make_mesh
from manus_jax.learner.packing import RowShape, add_packing
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, abstract_model, init_params
from manus_jax.rollout.batch import padded

ARCH = Architecture("qwen3", 64, 32, 64, 1, 4, 4, 8, qk_norm=True, initializer_range=0.2)


def make_learner(micro_batches, arch=ARCH, **options):
    graphdef, shapes = abstract_model(Transformer, arch, Compute())
    spec = LearnerSpec(
        shapes,
        objectives.policy(graphdef, policy_loss(RECIPES["grpo"])),
        lambda p, batch: objectives.log_probs_of(graphdef, p, batch)[0],
        optax.sgd(0.5),
        COLUMNS,
        RowShape(2, 64),
        micro_batches,
        micro_batches,
        **options,
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    return Learner(init_params(Transformer, arch, Compute(), 0), spec, mesh)


def make_batch(by=None):
    sequences = ragged_sequences(count=12)
    groups = [f"g{n // 3}" for n in range(12)]
    return add_packing(batch_of(sequences, group_id=groups), 64, by=by)


@pytest.mark.slow
def test_buffers_grow_with_the_batch_and_the_update_stays_the_same():
    batch = make_batch()
    small, large = make_learner(1), make_learner(12)
    metrics = [small.update(batch), large.update(batch)]
    assert metrics[0]["packing/rows"] > 2  # more than one micro-batch of two rows
    chex.assert_trees_all_close(small.state.params, large.state.params, rtol=1e-6)
    chex.assert_trees_all_close(metrics[0], metrics[1], rtol=1e-5)


@pytest.fixture(scope="module")
def learner():
    return make_learner(2)


def test_forward_gives_each_token_its_value_for_any_packing(learner):
    together = learner.forward(make_batch(), "old_log_probs").batch["old_log_probs"]
    apart = learner.forward(make_batch(by="group_id"), "old_log_probs").batch["old_log_probs"]
    np.testing.assert_allclose(together, apart, atol=1e-5)
    mask = make_batch().batch["loss_mask"]
    assert (together[~mask] == 0).all() and (together[mask] < 0).all()


@pytest.mark.slow
def test_a_mini_batch_updates_as_if_it_were_packed_alone():
    batch = make_batch(by="group_id")
    chosen = next(iter(batch.make_iterator(2, by="group_id", seed=(1, 2))))
    sequences = [
        {k: v[:n] for k, v in item.batch.items() if v.ndim and k in ("input_ids", *COLUMNS)}
        | {"loss_mask": item.batch["loss_mask"][:n]}
        for item in chosen
        for n in [int(item.batch["attention_mask"].sum())]
    ]
    alone = add_packing(batch_of(sequences), 64)
    learners = make_learner(4), make_learner(4)
    metrics = [learner.update(b) for learner, b in zip(learners, (chosen, alone), strict=True)]
    chex.assert_trees_all_close(learners[0].state.params, learners[1].state.params, atol=2e-6)
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-4)


@pytest.mark.slow
def test_every_pass_replays_the_experts_of_the_batch():
    arch = dataclasses.replace(ARCH, family="qwen3_moe", num_experts=8, experts_per_token=2)
    learner = make_learner(4, arch, routing=(1, 2))
    rng, sequences = np.random.default_rng(0), ragged_sequences(count=6)
    chosen = [
        rng.permuted(np.tile(np.arange(8), (len(s["input_ids"]), 1, 1)), axis=-1)[..., :2]
        for s in sequences
    ]
    width = max(map(len, chosen))
    column = padded(chosen, np.int16, -1, width=width, shape=(1, 2))
    batch = batch_of(sequences)
    routed = add_packing(batch.union(DataProto.from_dict({"routed_experts": column})), 64)
    own = add_packing(
        batch.union(DataProto.from_dict({"routed_experts": np.full_like(column, -1)})), 64
    )
    replayed = learner.forward(routed, "x").batch["x"]
    graphdef, _ = abstract_model(Transformer, arch, Compute())
    for row, (sequence, experts) in enumerate(zip(sequences, chosen, strict=True)):
        length = len(sequence["input_ids"])
        alone = {
            "input_ids": sequence["input_ids"][None],
            "segment_ids": np.ones((1, length), np.int32),
            "positions": np.arange(length, dtype=np.int32)[None],
            "loss_mask": sequence["loss_mask"][None],
            "routed_experts": experts[None],
        }
        alone = {name: jnp.asarray(x) for name, x in alone.items()}
        expected, _ = objectives.log_probs_of(graphdef, learner.state.params, alone)
        np.testing.assert_allclose(replayed[row, :length], expected[0], atol=1e-5)
    assert np.abs(replayed - learner.forward(own, "x").batch["x"]).max() > 1e-2
    losses = [learner.evaluate(b)["pg_loss"] for b in (routed, own)]
    assert abs(losses[0] - losses[1]) > 1e-4
    assert learner.update(routed)["update_skipped"] == 0


@pytest.mark.parametrize("method", ["update", "evaluate", "forward"])
def test_an_implicit_transfer_in_a_step_is_an_error(method, learner, monkeypatch):
    on_host = jax.device_get(learner.state.params)
    monkeypatch.setattr(learner, "state", learner.state._replace(params=on_host))
    arguments = (make_batch(), "old_log_probs") if method == "forward" else (make_batch(),)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        getattr(learner, method)(*arguments)
