"""Batches of trajectories: token rewards add up and are on sampled tokens."""

import dataclasses

import numpy as np
import pytest
from made_trajectories import forked, made, segment, two_turns

from manus_jax.learner.packing import PackedRows, RowShape, add_packing
from manus_jax.rewards import Score
from manus_jax.rollout.batch import RewardAllocation, to_batch

NAMES = ["last_token", "uniform_positive", "discounted", "per_turn"]


def rewards(trajectory, name: str, gamma: float = 1.0) -> list[list[float]]:
    batch = to_batch([trajectory], RewardAllocation(name, gamma)).batch
    lengths = batch["attention_mask"].sum(1)
    return [row[:n].tolist() for row, n in zip(batch["token_level_rewards"], lengths, strict=True)]


def test_last_token_is_the_agents_last() -> None:
    assert rewards(two_turns(), "last_token") == [[0, 0, 0, 0, 0, 0, 0, 0, 0, 1]]
    assert rewards(forked(), "last_token") == [[0] * 9, [0] * 10 + [0.25]]


def test_uniform_covers_every_agent_token_of_every_turn_and_segment() -> None:
    share = pytest.approx(0.2)
    assert rewards(two_turns(), "uniform_positive") == [
        [0, 0, 0, share, share, 0, 0, share, share, share]
    ]
    share = pytest.approx(0.25 / 8)
    wanted = [[0, 0, 0, 0, share, share, 0, share, share], [0] * 7 + [share] * 4]
    assert rewards(forked(), "uniform_positive") == wanted


def test_discounted_is_normalised_over_the_turns_of_all_segments() -> None:
    # Turns of 2, 2 and 4 tokens with 6, 4 and 0 after them: shares 1/64, 1/16, 1 at gamma 1/2.
    whole = 1 / 64 + 1 / 16 + 1
    a, b, c = (pytest.approx(0.25 * s / whole / n) for s, n in ((1 / 64, 2), (1 / 16, 2), (1, 4)))
    wanted = [[0, 0, 0, 0, a, a, 0, b, b], [0] * 7 + [c] * 4]
    assert rewards(forked(), "discounted", 0.5) == wanted


def test_per_turn_puts_each_turns_reward_on_its_last_token() -> None:
    assert rewards(two_turns(), "per_turn") == [[0, 0, 0, 0, 0.25, 0, 0, 0, 0, 0.75]]
    assert rewards(forked(), "per_turn") == [
        [0, 0, 0, 0, 0, 0.5, 0, 0, 0],
        [0] * 10 + [-0.25],
    ]


def test_penalties_sit_on_their_turn_and_in_the_total() -> None:
    trajectory = made(two_turns().segments, [0.0, 1.0], penalties={0: -0.5})
    assert trajectory.episode_reward == 0.5
    assert rewards(trajectory, "per_turn") == [[0, 0, 0, 0, -0.5, 0, 0, 0, 0, 1.0]]
    assert rewards(trajectory, "last_token") == [[0] * 9 + [0.5]]


@pytest.mark.bug("B36")
def test_a_score_replaces_the_environments_reward() -> None:
    outcome = dataclasses.replace(two_turns(), score=Score(3.0))
    assert rewards(outcome, "per_turn") == [[0] * 9 + [3.0]]
    process = dataclasses.replace(two_turns(), score=Score(3.0, {}, (0.5, 0.5)))
    assert rewards(process, "per_turn") == [[0, 0, 0, 0, 0.5, 0, 0, 0, 0, 2.5]]


@pytest.mark.bug("B3")
@pytest.mark.parametrize("name", NAMES)
def test_token_rewards_add_up_to_the_episodes_reward_on_agent_tokens(name: str) -> None:
    rng = np.random.default_rng(0)
    batch = []
    for number in range(12):
        segments, parts, turn = [], [(None, 3)], 0
        for _ in range(rng.integers(1, 6)):
            parts += [(turn, int(rng.integers(1, 9))), (None, int(rng.integers(1, 9)))]
            turn += 1
            if rng.random() < 0.4:
                segments.append(segment(parts[:-1]))
                parts = [(None, 5)]
        if len(parts) > 1:
            segments.append(segment(parts[:-1]))
        turns = [float(x) for x in rng.normal(size=turn)]
        batch.append(made(segments, turns, uid=str(number)))
    columns = to_batch(batch, RewardAllocation(name, 0.9)).batch
    rewarded = columns["token_level_rewards"]
    assert (rewarded[~columns["loss_mask"]] == 0).all()
    sums = np.zeros(12)
    np.add.at(sums, columns["episode_ids"], rewarded.sum(1, dtype=np.float64))
    assert sums == pytest.approx([t.episode_reward for t in batch], abs=1e-5)


def test_a_batch_has_a_row_per_segment_with_the_samplers_log_probs_and_versions() -> None:
    batch = to_batch([two_turns(), forked()], RewardAllocation()).batch
    assert batch["episode_ids"].tolist() == [0, 1, 1]
    sources = (*two_turns().segments, *forked().segments)
    for row, source in enumerate(sources):
        real = batch["attention_mask"][row]
        column = lambda name, row=row, real=real: batch[name][row][real].tolist()
        assert column("input_ids") == source.token_ids.tolist()
        assert column("loss_mask") == source.loss_mask.tolist()
        assert column("sampler_log_probs") == source.log_probs.tolist()
        assert column("turn_ids") == source.turn_ids.tolist()
        assert column("versions") == source.versions.tolist()
    assert batch["turn_ids"].dtype == batch["versions"].dtype == np.int32


def test_batches_are_packed_by_the_learner_without_losing_reward() -> None:
    batch = add_packing(to_batch([two_turns(), forked()], RewardAllocation()), 16)
    packed = PackedRows(batch, RowShape(3, 16), 1).arrays(["token_level_rewards", "turn_ids"])
    assert packed["token_level_rewards"].sum() == pytest.approx(1.25)
    assert packed["turn_ids"].dtype == np.int32


@pytest.mark.bug("B15")
def test_a_batch_contains_turns_of_any_length() -> None:
    proto = to_batch([two_turns(), forked()], RewardAllocation("per_turn"), pad_id=12)
    assert len(proto) == 3
    ids = proto.batch["input_ids"]
    assert ids.shape == (3, 11)
    assert ids[0].tolist() == [*range(10, 20), 12]
    # Token 12 is a real token here, and the padding too.
    assert proto.batch["attention_mask"][0].tolist() == [True] * 10 + [False]
    assert proto.batch["loss_mask"][0].tolist() == (
        [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3 + [False]
    )
    assert proto.batch["token_level_rewards"].sum(axis=1).tolist() == [1.0, 0.5, -0.25]
    assert proto.batch["turn_ids"][0].tolist() == [-1, -1, -1, 0, 0, -1, -1, 1, 1, 1, -1]
    assert (proto.batch["versions"][proto.batch["loss_mask"]] == 5).all()
    assert (proto.batch["sampler_log_probs"][~proto.batch["loss_mask"]] == 0).all()
    rows = {key: column.tolist() for key, column in proto.non_tensor_batch.items()}
    assert rows["uid"] == ["maze_3#0", "maze_5#0", "maze_5#0"]
    assert rows["segment"] == [0, 0, 1]
    assert [len(rewards) for rewards in rows["turn_rewards"]] == [2, 3, 3]
    assert rows["episode_reward"] == [1.0, 0.25, 0.25]
    assert rows["success"] == [True, False, False]
    assert rows["env"] == ["maze"] * 3
    assert rows["item_id"] == ["maze_3"] * 3
    assert rows["group_id"] == ["maze_3"] * 3


@pytest.mark.bug("B29")
def test_a_batch_is_as_wide_as_its_longest_segment() -> None:
    batch = to_batch([two_turns()], RewardAllocation()).batch
    assert batch["input_ids"].shape == (1, 10)
    assert batch["loss_mask"].sum() == 5
    assert batch["token_level_rewards"].sum() == 1.0


def test_an_empty_batch_is_an_empty_batch() -> None:
    assert len(to_batch([], RewardAllocation())) == 0


def test_an_episode_without_tokens_cannot_be_trained_on() -> None:
    spoken = dataclasses.replace(two_turns(), segments=())
    with pytest.raises(ValueError, match="episode maze_3#0 has no tokens to train on"):
        to_batch([spoken], RewardAllocation())


def test_unknown_allocations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown reward allocation 'first' \(known: last_tok"):
        RewardAllocation("first")
    with pytest.raises(ValueError, match=r"gamma = 1\.5"):
        RewardAllocation("discounted", 1.5)
