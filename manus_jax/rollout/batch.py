"""Trajectories as what a learner takes: packed samples, or a padded DataProto.

The one idea: rewards are allocated over the agent tokens of the whole episode, wherever its
segments lie, and then handed to the segments; so an episode's token rewards add up to its reward
however often its memory forked. Masks come from what was sampled, lengths from what is there: no
token's meaning is read off its id.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manus_jax.algorithms.reward_allocation import ALLOCATIONS, allocate
from manus_jax.data_proto import DataProto
from manus_jax.learner.packing import Sample
from manus_jax.rollout.trajectory import Segment, Trajectory


@dataclasses.dataclass(frozen=True)
class RewardAllocation:
    """How an episode's reward is spread over its tokens; `name` is one of ALLOCATIONS."""

    name: str = "last_token"
    gamma: float = 1.0  # discount per agent token; only "discounted" reads it

    def __post_init__(self) -> None:
        if self.name not in ALLOCATIONS:
            known = ", ".join(ALLOCATIONS)
            raise ValueError(f"unknown reward allocation {self.name!r}; there are {known}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma = {self.gamma} of the reward allocation is outside 0..1")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a sample comes from: segment `segment` of trajectory number `trajectory`."""

    trajectory: int
    segment: int


TokenField = Callable[[Trajectory, int], np.ndarray]
"""(trajectory, number of a segment) → one number per token of the segment, [T]."""

_OWN_FIELDS = ("sampler_log_probs", "token_rewards", "turn_ids", "versions")
_MORE_FIELDS: dict[str, TokenField] = {}


def register_field(name: str) -> Callable[[TokenField], TokenField]:
    """Decorator: gives every sample one more per-token field, for a policy loss that needs it."""

    def register(fn: TokenField) -> TokenField:
        if name in sample_fields():
            raise ValueError(f"samples have a field {name!r} already; choose another name")
        _MORE_FIELDS[name] = fn
        return fn

    return register


def sample_fields() -> tuple[str, ...]:
    """The names of the per-token fields that samples have."""
    return (*_OWN_FIELDS, *_MORE_FIELDS)


def _more_fields(trajectory: Trajectory, segment: int) -> dict[str, np.ndarray]:
    length = len(trajectory.segments[segment])
    fields = {}
    for name, fn in _MORE_FIELDS.items():
        fields[name] = np.asarray(fn(trajectory, segment), np.float32)
        if fields[name].shape != (length,):
            raise ValueError(
                f"field {name!r} of episode {trajectory.uid} has shape {fields[name].shape}, and "
                f"its segment {segment} has {length} tokens"
            )
    return fields


def token_rewards(
    trajectories: Sequence[Trajectory], allocation: RewardAllocation
) -> list[list[np.ndarray]]:
    """Rewards of the tokens of each segment, float32 [T], by trajectory.

    Over all segments of a trajectory they add up to its `episode_reward`.
    """
    if not trajectories:
        return []
    for trajectory in trajectories:
        _check_tokens(trajectory)
    # Allocation looks at agent tokens alone; sizes are rounded up so that few shapes are compiled.
    turn_ids = [np.concatenate([s.turn_ids[s.loss_mask] for s in t.segments]) for t in trajectories]
    shape = (_rounded(len(trajectories)), _rounded(max(map(len, turn_ids))))
    mask, turns = np.zeros(shape, bool), np.zeros(shape, np.int32)
    totals = np.zeros(shape[0], np.float32)
    steps = np.zeros((shape[0], _rounded(max(len(t.turns) for t in trajectories))), np.float32)
    for row, (trajectory, ids) in enumerate(zip(trajectories, turn_ids, strict=True)):
        mask[row, : len(ids)] = True
        turns[row, : len(ids)] = ids
        totals[row] = trajectory.episode_reward
        steps[row, : len(trajectory.turns)] = trajectory.turn_rewards
    placed = np.asarray(_allocate(allocation.name, mask, turns, totals, steps, allocation.gamma))
    return [
        _by_segment(trajectory.segments, placed[row, : len(ids)])
        for row, (trajectory, ids) in enumerate(zip(trajectories, turn_ids, strict=True))
    ]


def to_samples(
    trajectories: Sequence[Trajectory], allocation: RewardAllocation
) -> tuple[list[Sample], list[Origin]]:
    """One sample per segment, in order, with where each comes from.

    Fields, all 0 outside the mask: sampler_log_probs, token_rewards; turn_ids and versions, which
    are -1 there; and those of `register_field`.
    """
    samples, origins = [], []
    rewards = token_rewards(trajectories, allocation)
    for number, (trajectory, by_segment) in enumerate(zip(trajectories, rewards, strict=True)):
        for index, (segment, rewarded) in enumerate(
            zip(trajectory.segments, by_segment, strict=True)
        ):
            fields = {
                "sampler_log_probs": segment.log_probs,
                "token_rewards": rewarded,
                "turn_ids": segment.turn_ids.astype(np.float32),
                "versions": segment.versions.astype(np.float32),
                **_more_fields(trajectory, index),
            }
            ends = tuple(turn.stop for turn in trajectory.turns if turn.segment == index)
            samples.append(Sample(segment.token_ids, segment.loss_mask, fields, ends))
            origins.append(Origin(number, index))
    return samples, origins


def to_data_proto(
    trajectories: Sequence[Trajectory],
    allocation: RewardAllocation,
    pad_id: int = 0,
    length: int | None = None,
) -> DataProto:
    """One row per segment, padded on the right to `length` (or to the longest).

    Arrays [rows, length]: input_ids, attention_mask, position_ids, loss_mask, turn_ids, versions,
    token_level_rewards, sampler_log_probs, and those of `register_field`. Per row: uid, group_id,
    env, item_id, segment, turns, valid_actions, episode_reward, env_reward, success, end_reason.
    """
    samples, origins = to_samples(trajectories, allocation)
    longest = max(map(len, samples), default=0)
    width = longest if length is None else length
    if longest > width:
        raise ValueError(f"a segment has {longest} tokens and a row {width}; raise the length")

    def padded(arrays: Sequence[np.ndarray], fill: int, dtype: Any) -> np.ndarray:
        rows = np.full((len(arrays), width), fill, dtype)
        for row, array in zip(rows, arrays, strict=True):
            row[: len(array)] = array
        return rows

    def field(name: str, fill: int, dtype: Any) -> np.ndarray:
        return padded([sample.fields[name] for sample in samples], fill, dtype)

    tensors = {
        "input_ids": padded([s.input_ids for s in samples], pad_id, np.int32),
        "attention_mask": padded([np.ones(len(s), bool) for s in samples], 0, np.bool_),
        "position_ids": padded([np.arange(len(s)) for s in samples], 0, np.int32),
        "loss_mask": padded([s.loss_mask for s in samples], 0, np.bool_),
        "turn_ids": field("turn_ids", -1, np.int32),
        "versions": field("versions", -1, np.int32),
        "token_level_rewards": field("token_rewards", 0, np.float32),
        "sampler_log_probs": field("sampler_log_probs", 0, np.float32),
        **{name: field(name, 0, np.float32) for name in _MORE_FIELDS},
    }
    rows = [(trajectories[origin.trajectory], origin.segment) for origin in origins]
    others: dict[str, list[Any]] = {
        "uid": [t.uid for t, _ in rows],
        "group_id": [t.group_id for t, _ in rows],
        "env": [t.task.env for t, _ in rows],
        "item_id": [t.task.item_id for t, _ in rows],
        "segment": [segment for _, segment in rows],
        "turns": [len(t.turns) for t, _ in rows],
        "valid_actions": [sum(turn.valid for turn in t.turns) for t, _ in rows],
        "episode_reward": [t.episode_reward for t, _ in rows],
        "env_reward": [t.env_reward for t, _ in rows],
        "success": [t.success for t, _ in rows],
        "end_reason": [t.end_reason for t, _ in rows],
    }
    return DataProto.from_dict(tensors, others)


@functools.partial(jax.jit, static_argnums=0)
def _allocate(
    name: str,
    mask: jax.Array,
    turn_ids: jax.Array,
    totals: jax.Array,
    steps: jax.Array,
    gamma: float,
) -> jax.Array:
    return allocate(name, mask, turn_ids, totals, steps, jnp.float32(gamma))


def _check_tokens(trajectory: Trajectory) -> None:
    if not trajectory.segments:
        raise ValueError(
            f"episode {trajectory.uid} has no tokens to train on: it was played by a policy that "
            "speaks text, or has no turn"
        )


def _rounded(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _by_segment(segments: Sequence[Segment], placed: np.ndarray) -> list[np.ndarray]:
    """Rewards of agent tokens, [agent tokens of the episode], back at their places."""
    rewards, start = [], 0
    for segment in segments:
        agent_tokens = int(segment.loss_mask.sum())
        rewarded = np.zeros(len(segment), np.float32)
        rewarded[segment.loss_mask] = placed[start : start + agent_tokens]
        rewards.append(rewarded)
        start += agent_tokens
    return rewards
