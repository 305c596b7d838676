"""Converts trajectories to a `DataProto`, the training batch of a step.

Each segment is one row, padded on the right. Rewards are allocated over the agent tokens of the
whole episode and then written to the tokens' segments, so the token rewards of an episode sum to
its reward for any number of segments. Masks and lengths come from the sampled spans, never from
token id values.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manus_jax.algorithms.advantages import has_signal
from manus_jax.algorithms.batch_advantages import group_numbers
from manus_jax.algorithms.episode_tokens import EpisodeTokens
from manus_jax.algorithms.recipes import Keeps
from manus_jax.algorithms.reward_allocation import ALLOCATIONS, allocate
from manus_jax.data_proto import DataProto
from manus_jax.errors import UserError
from manus_jax.registry import Registry
from manus_jax.rollout.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class RewardAllocation:
    """How an episode's reward is allocated to its tokens; `name` is one of ALLOCATIONS."""

    name: str = "last_token"
    gamma: float = 1.0  # discount per agent token; only "discounted" reads it

    def __post_init__(self) -> None:
        ALLOCATIONS[self.name]  # RegistryError for unknown names
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma = {self.gamma} of the reward allocation is outside 0..1")


TokenColumn = Callable[[Trajectory, int], np.ndarray]
"""(trajectory, index of a segment) → one number per token of the segment, [T]."""

_COLUMNS = ("sampler_log_probs", "token_level_rewards", "turn_ids", "versions")
_EPISODE_COLUMNS = (
    *("uid", "group_id", "turn_rewards", "observations"),
    *("episode_reward", "env_reward", "success", "end_reason"),
    *("parent", "branch_turn"),
)
_LATER = ("old_log_probs", "ref_log_probs", "values", "advantages", "returns", "loss_weights")
_SHAPE = ("input_ids", "attention_mask", "loss_mask", "episode_ids", "greedy_rewards")
_ROUTED = "routed_experts"
_RESERVED = (*_COLUMNS, *_LATER, *_SHAPE, _ROUTED)

TOKEN_COLUMNS: Registry[TokenColumn] = Registry("token column", _RESERVED)
"""User-defined per-token columns, added to every batch for policy losses that need them."""


class BatchError(UserError, ValueError):
    """Episodes or columns that cannot be combined into a batch."""


def token_columns() -> tuple[str, ...]:
    """The names of the per-token columns that `to_batch` creates."""
    return (*_COLUMNS, *TOKEN_COLUMNS)


def drop_singleton_groups(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """Drops episodes that are the only one of their group: the other members failed."""
    sizes = Counter(e.group_id for e in episodes)
    return [e for e in episodes if sizes[e.group_id] > 1]


def drop_uniform_groups(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """Drops groups whose environment rewards are all equal; reward shaping is not considered."""
    if not episodes:
        return []
    outcomes = np.array([float(e.env_reward) for e in episodes], np.float32)
    groups = group_numbers(np.array([e.group_id for e in episodes], object))
    keep = has_signal(outcomes, groups, np.ones(len(episodes), bool))
    return [e for e, k in zip(episodes, np.asarray(keep), strict=True) if k]


def keep_by_success(episodes: Sequence[Trajectory], keeps: Keeps) -> list[Trajectory]:
    """The episodes that `keeps` selects in their groups, by success."""
    groups: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    kept: set[str] = set()
    for group in groups.values():
        chosen = keeps(np.array([episode.success for episode in group], bool))
        kept |= {episode.uid for episode, keep in zip(group, chosen, strict=True) if keep}
    return [episode for episode in episodes if episode.uid in kept]


def to_batch(
    trajectories: Sequence[Trajectory],
    allocation: RewardAllocation,
    pad_id: int = 0,
    routing: tuple[int, int] | None = None,
) -> DataProto:
    """A batch with one row per segment, in the order of the episodes.

    Arrays [rows, length]: input_ids, attention_mask, loss_mask, turn_ids and versions (-1 outside
    the loss mask), token_level_rewards, sampler_log_probs, and those of TOKEN_COLUMNS; [rows]:
    episode_ids. With `routing`, the numbers of layers and of experts per token, routed_experts
    [rows, length, *routing] are the experts that the engine chose, -1 where they are not known. Per
    row on the host: uid, group_id, env, item_id, segment, turn_rewards, observations,
    episode_reward, env_reward, success, end_reason, and the tree that branching episodes form:
    parent (a uid or None) and branch_turn.
    """
    for trajectory in trajectories:
        if not trajectory.segments:
            raise BatchError(
                f"episode {trajectory.uid} has no tokens to train on: it was played by a policy "
                "that produces text, or it has no turns"
            )
    rows = [(n, t, i) for n, t in enumerate(trajectories) for i in range(len(t.segments))]
    segments = [t.segments[i] for _, t, i in rows]
    pad = functools.partial(padded, width=max(map(len, segments), default=0))
    arrays = {
        "input_ids": pad([s.token_ids for s in segments], np.int32, pad_id),
        "attention_mask": pad([np.ones(len(s), bool) for s in segments], np.bool_),
        "loss_mask": pad([s.loss_mask for s in segments], np.bool_),
        "turn_ids": pad([s.turn_ids for s in segments], np.int32, -1),
        "versions": pad([s.versions for s in segments], np.int32, -1),
        "sampler_log_probs": pad([s.log_probs for s in segments], np.float32),
        "episode_ids": np.array([n for n, _, _ in rows], np.int32),
    }
    for name in TOKEN_COLUMNS:
        values = [_user_column(name, t, i) for _, t, i in rows]
        arrays[name] = pad(values, np.result_type(*values) if values else np.float32)
    if routing is not None:
        none = np.zeros((0, *routing), np.int16)
        experts = [none if s.experts is None else s.experts for s in segments]
        arrays[_ROUTED] = pad(experts, np.int16, -1, shape=routing)
    host: dict[str, list[Any]] = {
        "env": [t.task.env for _, t, _ in rows],
        "item_id": [t.task.item_id for _, t, _ in rows],
        "segment": [i for _, _, i in rows],
    }
    for name in _EPISODE_COLUMNS:
        host[name] = [getattr(t, name) for _, t, _ in rows]
    batch = DataProto.from_dict(arrays, host)
    return batch.union(_token_rewards(batch, allocation))


def add_greedy_rewards(batch: DataProto, greedy: Mapping[str, float]) -> DataProto:
    """Adds the column greedy_rewards, [rows]: the reward of the greedy episode of each row's group.

    If the greedy episode of a group failed, the baseline is the episode's own reward.
    """
    host = batch.non_tensor_batch
    rewards = [
        greedy.get(group, own)
        for group, own in zip(host["group_id"], host["episode_reward"], strict=True)
    ]
    return batch.union(DataProto.from_dict({"greedy_rewards": np.array(rewards, np.float32)}))


def padded(
    arrays: Sequence[np.ndarray],
    dtype: Any,
    fill: int = 0,
    *,
    width: int,
    shape: tuple[int, ...] = (),
) -> np.ndarray:
    """Arrays [T, *shape] of different lengths as rows [len(arrays), width, *shape]."""
    rows = np.full((len(arrays), width, *shape), fill, dtype)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return rows


def _user_column(name: str, trajectory: Trajectory, segment: int) -> np.ndarray:
    values = np.asarray(TOKEN_COLUMNS[name](trajectory, segment))
    length = len(trajectory.segments[segment])
    if values.shape != (length,):
        raise BatchError(
            f"column {name!r} of episode {trajectory.uid} has shape {values.shape}, but its "
            f"segment {segment} has {length} tokens"
        )
    return values.astype(np.int32 if values.dtype.kind in "iu" else np.float32)


def _token_rewards(batch: DataProto, allocation: RewardAllocation) -> DataProto:
    """Adds the column token_level_rewards; each episode's token rewards sum to its reward."""
    if not len(batch):
        return DataProto.from_dict({"token_level_rewards": np.zeros((0, 0), np.float32)})
    tokens = EpisodeTokens(batch)
    host = batch.non_tensor_batch
    turns = host["turn_rewards"][tokens.first_rows]
    longest = -(-max(len(t) for t in turns) // 8) * 8
    turn_rewards = np.zeros((tokens.shape[0], longest), np.float32)
    for row, rewards in enumerate(turns):
        turn_rewards[row, : len(rewards)] = rewards
    placed = _allocate(
        allocation.name,
        tokens.mask,
        tokens.gather(np.asarray(batch.batch["turn_ids"])),
        tokens.per_episode(host["episode_reward"].astype(np.float32)),
        turn_rewards,
        jnp.float32(allocation.gamma),
    )
    return DataProto.from_dict({"token_level_rewards": tokens.scatter(np.asarray(placed))})


_allocate = jax.jit(allocate, static_argnums=0)
