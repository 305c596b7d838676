"""Advantages relative to siblings: every stretch of a tree is compared with its siblings."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jit_and_eager import both

from manus_jax.algorithms import advantages, sibling
from manus_jax.algorithms.batch_advantages import add_advantages
from manus_jax.algorithms.kl import FixedKL
from manus_jax.algorithms.recipes import RECIPES
from manus_jax.data.tasks import Task
from manus_jax.rollout.batch import RewardAllocation, to_batch
from manus_jax.rollout.trajectory import EpisodeSpec, Segment, Trajectory, Turn

# Rows: trunk a, two branches of a at turn 1, a branch of a at turn 2, trunk b. Three turns each.
SCORES = jnp.array([1.0, 0.0, 0.5, 0.0, 0.0])
GROUPS = jnp.zeros(5, int)
VALID = jnp.ones(5, bool)
TREE = sibling.Tree(
    parents=jnp.array([0, 0, 0, 0, 4]),
    branch_turns=jnp.array([0, 1, 1, 2, 0]),
    roots=jnp.array([True, False, False, False, True]),
    taken=jnp.array([[1, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 0]], bool),
    turn_ids=jnp.zeros((5, 2), int),
)

grpo = jax.jit(advantages.grpo)
compute = jax.jit(sibling.sibling, static_argnames="normalize_by_std")


@both
def test_every_stretch_is_compared_with_its_siblings_as_calculated_by_hand(variant):
    # Turn 2: a (1) and its branch (0) have mean 0.5: +0.5 and -0.5; a from turn 1 on is worth 0.5.
    # Turn 1: a (0.5) and its branches (0, 0.5) have mean 1/3: +1/6, -1/3, +1/6, and the last two
    # keep theirs to the end. Turn 0: a is worth 1/3 and b 0, mean 1/6: +1/6 and -1/6.
    expected = [
        [1 / 6, 1 / 6, 0.5, 0],
        [0, -1 / 3, -1 / 3, 0],
        [0, 1 / 6, 1 / 6, 0],
        [0, 0, -0.5, 0],
        [-1 / 6, -1 / 6, -1 / 6, 0],
    ]
    found = variant(sibling.sibling)(SCORES, GROUPS, VALID, TREE)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # Divided by the deviations: sqrt(0.5) of {1, 0}, and 1 / (3 sqrt(2)) of {1/3, 0}.
    fn = variant(partial(sibling.sibling, normalize_by_std=True))
    found = fn(SCORES, GROUPS, VALID, TREE)
    np.testing.assert_allclose(found[0, 2], 0.5 / np.sqrt(0.5), rtol=1e-4)
    np.testing.assert_allclose(found[4, 0], -(1 / 6) * 3 * np.sqrt(2), rtol=1e-4)


@both
def test_without_branches_it_is_grpo(variant):
    alone = sibling.Tree(
        parents=jnp.arange(5),
        branch_turns=jnp.zeros(5, int),
        roots=jnp.ones(5, bool),
        taken=jnp.ones((5, 4), bool),
        turn_ids=TREE.turn_ids,
    )
    groups = jnp.array([0, 0, 1, 1, 2])
    found = variant(partial(sibling.sibling, normalize_by_std=True))(SCORES, groups, VALID, alone)
    expected = np.array(grpo(SCORES, groups, VALID))
    expected[4] = 0  # an episode without siblings has nothing to be compared with
    np.testing.assert_allclose(found, np.repeat(expected[:, None], 4, 1), rtol=1e-6)


def test_branches_at_the_first_turn_are_a_group_of_grpo():
    tree = TREE._replace(
        parents=jnp.array([0, 0, 0, 0, 0]),
        branch_turns=jnp.zeros(5, int),
        roots=jnp.array([True, False, False, False, False]),
        taken=jnp.ones((5, 4), bool),
    )
    found = compute(SCORES, GROUPS, VALID, tree, normalize_by_std=True)
    expected = np.array(grpo(SCORES, GROUPS, VALID))
    np.testing.assert_allclose(found, np.repeat(expected[:, None], 4, 1), rtol=1e-6)


def test_a_row_that_is_not_valid_counts_nowhere():
    valid = VALID.at[3].set(False)
    found = np.array(compute(SCORES, GROUPS, valid, TREE))
    # Without the branch at turn 2, a has the value 1 from turn 1 on: {1, 0, 0.5}, and 0.5 before.
    np.testing.assert_allclose(found[:3, 1], [0.5, -0.5, 0.0], atol=1e-6)
    np.testing.assert_allclose(found[0], [0.25, 0.5, 0.5, 0], atol=1e-6)
    assert (found[3] == 0).all()


def episode(uid, reward, parent=None, branch_turn=0, group="g"):
    """Three turns of two tokens each after one given token; turns of the parent are context."""
    turn_ids = np.array([-1, 0, 0, 1, 1, 2, 2], np.int32)
    turn_ids = np.where(turn_ids >= branch_turn, turn_ids, -1)
    mask = turn_ids >= 0
    segment = Segment(
        np.arange(7, dtype=np.int32),
        mask,
        np.where(mask, -1.0, 0.0).astype(np.float32),
        np.where(mask, 3, -1).astype(np.int32),
        turn_ids,
    )
    turns = [
        Turn("t", "a", "o", reward if k == 2 else 0.0, start=2 * k + 1, stop=2 * k + 3)
        for k in range(3)
    ]
    return Trajectory(
        EpisodeSpec(Task("maze", 1, "maze_1"), uid, group),
        (),
        "first",
        tuple(turns),
        (segment,),
        reward,
        reward > 0,
        "done",
        parent=parent,
        branch_turn=branch_turn,
    )


TREE_EPISODES = [
    episode("a", 1.0),
    episode("a^1.1", 0.0, "a", 1),
    episode("a^1.2", 0.5, "a", 1),
    episode("a^2.1", 0.0, "a", 2),
    episode("b", 0.0),
]
RECIPE = dataclasses.replace(RECIPES["sibling"], kl_placement="none", kl_coef=0.0)


@pytest.mark.parametrize("allocation", ["last_token", "per_turn"])
def test_the_batch_has_the_tree_and_each_shared_token_is_trained_once(allocation):
    batch = to_batch(TREE_EPISODES, RewardAllocation(allocation))
    host = batch.non_tensor_batch
    assert list(host["parent"]) == [None, "a", "a", "a", None]
    assert list(host["branch_turn"]) == [0, 1, 1, 2, 0]
    assert batch.batch["loss_mask"].sum() == 6 + 4 + 4 + 2 + 6
    np.testing.assert_allclose(batch.batch["token_level_rewards"].sum(1), [1, 0, 0.5, 0, 0])
    found, _, _ = add_advantages(batch, RECIPE, FixedKL(0.0))
    expected = np.zeros((5, 7))
    expected[0] = [0, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 0.5, 0.5]
    expected[1, 3:], expected[2, 3:], expected[3, 5:], expected[4, 1:] = -1 / 3, 1 / 6, -0.5, -1 / 6
    np.testing.assert_allclose(found.batch["advantages"], expected, atol=1e-6)


def test_branches_whose_parent_was_dropped_are_compared_with_each_other():
    batch = to_batch(TREE_EPISODES[1:], RewardAllocation())
    found, _, _ = add_advantages(batch, RECIPE, FixedKL(0.0))
    # {0, 0.5} at turn 1; the branch at turn 2 and the other trunk have no siblings.
    last = np.asarray(found.batch["advantages"])[:, -1]
    np.testing.assert_allclose(last, [-0.25, 0.25, 0, 0], atol=1e-6)


def test_a_kl_term_in_the_reward_is_refused():
    with pytest.raises(ValueError, match="rewards with KL cannot be compared; use 'loss'"):
        dataclasses.replace(RECIPE, kl_placement="reward", kl_coef=0.1)
