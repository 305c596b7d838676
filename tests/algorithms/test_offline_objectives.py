"""Rejection-sampling fine-tuning and DPO: which episodes are kept, and what the gradient is."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jit_and_eager import both

from manus_jax.algorithms import dpo, rft
from manus_jax.algorithms.aggregation import token_weights
from manus_jax.algorithms.batch_advantages import add_advantages
from manus_jax.algorithms.kl import FixedKL
from manus_jax.algorithms.recipes import RECIPES, policy_loss
from manus_jax.data.tasks import Task
from manus_jax.data_proto import DataProto
from manus_jax.rollout.batch import RewardAllocation, keep_by_success, to_batch
from manus_jax.rollout.trajectory import EpisodeSpec, Segment, Trajectory, Turn

BETA = 0.5
# Two tasks: one winner against two losers, and two winners against a loser.
WON = np.array([True, False, False, True, True, False])
GROUPS = np.array([0, 0, 0, 1, 1, 1])
LENGTHS = (3, 1, 2, 2, 4, 3)


def episode(index, group=None, won=None):
    length = LENGTHS[index]
    mask = np.arange(length + 1) > 0
    segment = Segment(
        np.arange(length + 1, dtype=np.int32),
        mask,
        np.where(mask, -1.0, 0.0).astype(np.float32),
        np.where(mask, 3, -1).astype(np.int32),
        np.where(mask, 0, -1).astype(np.int32),
    )
    won = bool(WON[index]) if won is None else won
    turn = Turn("t", "a", "o", float(won), start=1, stop=length + 1)
    spec = EpisodeSpec(Task("maze", 1, "maze_1"), f"e{index}", group or f"g{GROUPS[index]}")
    return Trajectory(spec, (), "first", (turn,), (segment,), float(won), won, "done")


def direct_loss(log_probs, ref, mask):
    """DPO as it is written down: the mean over tasks of the mean over their pairs."""
    r = jnp.where(mask, log_probs - ref, 0.0).sum(1)
    first = [-jax.nn.log_sigmoid(BETA * (r[0] - r[loser])) for loser in (1, 2)]
    second = [-jax.nn.log_sigmoid(BETA * (r[winner] - r[5])) for winner in (3, 4)]
    return (sum(first) / 2 + sum(second) / 2) / 2


def random_batch():
    batch = to_batch([episode(i) for i in range(6)], RewardAllocation())
    mask = np.asarray(batch.batch["loss_mask"])
    rng = np.random.default_rng(0)
    old, ref = (np.where(mask, -rng.random(mask.shape), 0).astype(np.float32) for _ in range(2))
    return batch.union(DataProto.from_dict({"old_log_probs": old, "ref_log_probs": ref}))


def test_the_policy_gradient_with_its_advantages_is_the_gradient_of_dpo():
    recipe = dataclasses.replace(RECIPES["dpo"], beta=BETA)
    batch, metrics, _ = add_advantages(random_batch(), recipe, FixedKL(0.0))
    mask = np.asarray(batch.batch["loss_mask"])
    old, ref = batch.batch["old_log_probs"], batch.batch["ref_log_probs"]
    fields = {"old_log_probs": old, "advantages": batch.batch["advantages"], "mask": mask}
    assert set(recipe.loss_fields) == set(fields)
    weights = token_weights(mask, recipe.aggregation)

    def objective(log_probs):
        return jnp.sum(weights * policy_loss(recipe)(log_probs, fields)[0])

    loss, expected = jax.jit(jax.value_and_grad(direct_loss))(jnp.asarray(old), ref, mask)
    gradient = jax.jit(jax.grad(objective))(jnp.asarray(old))
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    np.testing.assert_allclose(metrics["dpo/loss"], loss, rtol=1e-5)


@both
def test_dpo_matches_hand_calculation(variant):
    # One task, r = 2 for the winner and 0 for the loser: sigmoid(-0.5 * 2) = 1 / (1 + e), times
    # beta, times 2 episodes per task. The third episode has no opposite in its group.
    preferences = dpo.Preferences(jnp.array([2.0, 0.0, 1.0]), jnp.array([True, False, True]))
    groups, valid = jnp.array([0, 0, 1]), jnp.array([True, True, True])
    slope = 0.5 / (1 + np.e) * 3
    found = variant(partial(dpo.dpo, beta=BETA))(preferences, groups, valid)
    np.testing.assert_allclose(found, [slope, -slope, 0.0], rtol=1e-6)
    found = variant(partial(dpo.pair_statistics, beta=BETA))(preferences, groups, valid)
    np.testing.assert_allclose(found, [np.log(1 + np.exp(-1.0)), 1.0, 2.0], rtol=1e-6)


def test_rft_keeps_successes_and_its_gradient_is_that_of_their_cross_entropy():
    episodes = [episode(i) for i in range(6)]
    kept = keep_by_success(episodes, rft.kept)
    assert [e.uid for e in kept] == ["e0", "e3", "e4"]
    recipe = RECIPES["rft"]
    batch, _, _ = add_advantages(to_batch(kept, RewardAllocation()), recipe, FixedKL(0.0))
    mask = np.asarray(batch.batch["loss_mask"])
    log_probs = jnp.where(mask, -0.7, 0.0)
    fields = {"old_log_probs": log_probs, "advantages": batch.batch["advantages"], "mask": mask}
    assert set(recipe.loss_fields) == set(fields)
    weights = token_weights(mask, recipe.aggregation)
    loss, _ = policy_loss(recipe)(log_probs, fields)
    np.testing.assert_allclose(jnp.sum(weights * loss), 0.7, rtol=1e-6)


@pytest.mark.parametrize(
    ("won", "kept"), [([1, 0, 1], [0, 1, 2]), ([1, 1, 1], []), ([0, 0, 0], [])]
)
def test_dpo_keeps_groups_with_successes_and_failures(won, kept):
    episodes = [episode(i, group="g", won=bool(w)) for i, w in enumerate(won)]
    assert [e.uid for e in keep_by_success(episodes, dpo.kept)] == [f"e{i}" for i in kept]


def test_dpo_needs_a_reference_and_rft_does_not():
    assert RECIPES["dpo"].needs_reference and not RECIPES["rft"].needs_reference
