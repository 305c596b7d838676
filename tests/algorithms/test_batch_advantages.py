"""Advantages of episodes are on the right tokens, whatever the other tokens are."""

import dataclasses

import jax
import numpy as np
import pytest

from manus_jax.algorithms.batch_advantages import add_advantages, mismatch_of_batch
from manus_jax.algorithms.kl import FixedKL
from manus_jax.algorithms.recipes import RECIPES
from manus_jax.data.tasks import Task
from manus_jax.data_proto import DataProto
from manus_jax.rollout.batch import (
    RewardAllocation,
    drop_singleton_groups,
    drop_uniform_groups,
    to_batch,
)
from manus_jax.rollout.trajectory import EpisodeSpec, Segment, Trajectory, Turn

LAST = RewardAllocation("last_token")
GRPO = dataclasses.replace(RECIPES["grpo"], kl_placement="none", kl_coef=0.0)


def episode(group, reward, pieces=((2, 3), (1, 2)), segments=1, name=""):
    """`pieces`: (observation tokens, agent tokens) per turn; two segments fork after turn one."""
    turns, rows, streams = [], [[]], []
    for number, (given, said) in enumerate(pieces):
        if number and segments == 2:
            rows.append([])
        row = rows[-1]
        row += [(-1, False)] * given
        start = len(row)
        row += [(number, True)] * said
        last = number == len(pieces) - 1
        turns.append(
            Turn(
                "t",
                "a",
                "o",
                reward if last else 0.0,
                segment=len(rows) - 1,
                start=start,
                stop=len(row),
            )
        )
    for row in rows:
        n = len(row)
        mask = np.array([m for _, m in row])
        streams.append(
            Segment(
                np.arange(n, dtype=np.int32),
                mask,
                np.where(mask, -1.0, 0.0).astype(np.float32),
                np.where(mask, 3, -1).astype(np.int32),
                np.array([t for t, _ in row], np.int32),
            )
        )
    spec = EpisodeSpec(Task("maze", 1, "maze_1"), f"{group}{name}{reward}", group)
    return Trajectory(spec, (), "first", tuple(turns), tuple(streams), reward, reward > 0, "done")


def advantages(episodes, recipe=GRPO, **columns):
    batch = to_batch(episodes, LAST)
    filled = {
        key: np.where(batch.batch["loss_mask"], value, 0).astype(np.float32)
        for key, value in columns.items()
    }
    batch = batch.union(DataProto.from_dict(filled))
    result, metrics, _ = add_advantages(batch, recipe, FixedKL(recipe.kl_coef))
    return result, metrics


def on_agent_tokens(batch, name):
    """The column's values on the agent tokens of each row."""
    rows = zip(batch.batch[name], batch.batch["loss_mask"], strict=True)
    return [row[mask] for row, mask in rows]


def test_group_advantages_reach_every_agent_token_and_no_other():
    # Scores 1, 0 in one group: mean 0.5, unbiased std sqrt(0.5): (1 - 0.5) / 0.7071 = 0.7071.
    result, metrics = advantages([episode("g", 1.0), episode("g", 0.0)])
    expected = np.sqrt(0.5)
    mask = result.batch["loss_mask"]
    for row, agent, sign in zip(result.batch["advantages"], mask, (1, -1), strict=True):
        np.testing.assert_allclose(row, sign * expected * agent, rtol=1e-4)
    assert metrics["critic/score/mean"] == pytest.approx(0.5)


@pytest.mark.bug("B18")
def test_observation_tokens_move_no_advantage():
    recipe = dataclasses.replace(RECIPES["ppo"], kl_placement="none", kl_coef=0.0)
    few = [episode("g", 1.0), episode("h", 0.0)]
    many = [episode("g", 1.0, ((9, 3), (7, 2))), episode("h", 0.0, ((4, 3), (30, 2)))]
    per_token = []
    for episodes in (few, many):
        result, _ = advantages(episodes, recipe, values=0.25)
        per_token.append(on_agent_tokens(result, "advantages"))
    for a, b in zip(*per_token, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_forked_memory_gives_the_tokens_of_all_its_segments_the_same_as_one_stream():
    whole, _ = advantages([episode("g", 1.0), episode("g", 0.0)])
    forked, _ = advantages([episode("g", 1.0, segments=2), episode("g", 0.0)])
    assert len(forked) == 3
    joined = np.concatenate(on_agent_tokens(forked, "advantages")[:2])
    np.testing.assert_allclose(joined, on_agent_tokens(whole, "advantages")[0], rtol=1e-5)
    assert forked.batch["episode_ids"].tolist() == [0, 0, 1]
    assert forked.non_tensor_batch["group_id"].tolist() == ["g", "g", "g"]


def test_gae_of_a_forked_episode_runs_over_its_agent_tokens_in_order():
    recipe = dataclasses.replace(
        RECIPES["ppo"], kl_placement="none", kl_coef=0.0, gamma=0.9, lam=0.8, whiten=False
    )
    pieces = ((2, 3), (1, 2))
    for name in ("advantages", "returns"):
        columns = []
        for segments in (1, 2):
            episodes = [episode("g", 1.0, pieces, segments), episode("h", 0.0)]
            result, _ = advantages(episodes, recipe, values=0.25)
            columns.append(np.concatenate(on_agent_tokens(result, name)))
        np.testing.assert_array_equal(*columns)


def test_rows_may_come_in_any_order_of_episodes():
    recipe = dataclasses.replace(RECIPES["ppo"], kl_placement="none", kl_coef=0.0)
    episodes = [episode("g", 1.0, segments=2), episode("h", 0.0), episode("h", 1.0, segments=2)]
    batch = to_batch(episodes, LAST)
    values = np.where(batch.batch["loss_mask"], 0.25, 0).astype(np.float32)
    batch = batch.union(DataProto.from_dict({"values": values}))
    expected, _, _ = add_advantages(batch, recipe, FixedKL(0.0))
    order = np.array([3, 0, 2, 1, 4])  # segments of an episode stay in order
    shuffled, _, _ = add_advantages(batch[order], recipe, FixedKL(0.0))
    np.testing.assert_allclose(
        shuffled.batch["advantages"], expected.batch["advantages"][order], atol=1e-6
    )


def test_gae_by_hand_over_two_turns():
    # gamma = lam = 1: every advantage is the reward to come less the value: 1 - 0.25, then whitened
    # to the same number for all tokens, so compare returns, which are not whitened.
    recipe = dataclasses.replace(RECIPES["ppo"], kl_placement="none", kl_coef=0.0)
    result, metrics = advantages([episode("g", 1.0), episode("h", 0.0)], recipe, values=0.25)
    for returns, total in zip(on_agent_tokens(result, "returns"), (1.0, 0.0), strict=True):
        np.testing.assert_allclose(returns, total, atol=1e-5)
    assert metrics["critic/values/mean"] == pytest.approx(0.25)


@pytest.mark.bug("B7")
def test_kl_in_the_reward_lowers_it_by_the_coefficient_times_the_difference():
    recipe = dataclasses.replace(RECIPES["ppo"], kl_coef=0.1)
    _, metrics = advantages(
        [episode("g", 1.0), episode("h", 0.0)],
        recipe,
        values=0.0,
        old_log_probs=-1.0,
        ref_log_probs=-1.5,
    )
    # Five agent tokens, each 0.1 * (-1.0 + 1.5) = 0.05 less.
    assert metrics["critic/rewards/max"] == pytest.approx(1.0 - 0.25)
    assert metrics["critic/kl"] == pytest.approx(0.5)


@pytest.mark.bug("B5")
def test_episodes_that_lost_their_siblings_are_left_out_and_groups_without_signal_too():
    episodes = [episode("a", 1.0), episode("a", 0.0), episode("b", 1.0)]
    assert [e.group_id for e in drop_singleton_groups(episodes)] == ["a", "a"]
    episodes = [
        episode("a", 1.0),
        episode("a", 0.0),
        episode("b", 1.0),
        episode("b", 1.0, name="x"),
    ]
    assert [e.group_id for e in drop_uniform_groups(episodes)] == ["a", "a"]


def test_gigpo_distinguishes_steps_from_the_same_state():
    recipe = dataclasses.replace(RECIPES["gigpo"], kl_placement="none", kl_coef=0.0)
    result, _ = advantages([episode("g", 1.0), episode("g", 0.0)], recipe)
    good, bad = on_agent_tokens(result, "advantages")
    assert (good > 0).all() and (bad < 0).all()


def test_the_mismatch_is_over_agent_tokens_and_compiles_nothing_for_another_number_of_them():
    compiled = []
    listen = lambda event, seconds, **_: compiled.append(event)

    def mismatch(*pieces):
        batch = to_batch([episode("g", 1.0, pieces)], LAST)
        # The sampler's log-probs are -1; outside the loss mask, anything may stand.
        log_probs = np.where(batch.batch["loss_mask"], -1.25, 7.0).astype(np.float32)
        return mismatch_of_batch(batch, log_probs)

    first = mismatch((2, 3), (1, 2))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        other = mismatch((5, 4), (1, 7), (3, 1))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in compiled if "compile" in event]
    for metrics in (first, other):
        assert metrics["log_prob_diff_mean"] == metrics["log_prob_diff_max"] == 0.25
        assert metrics["kl_k1"] == 0.25
