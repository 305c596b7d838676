"""Trajectories put together by hand, for tests of what is made of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.rollout.trajectory import EpisodeSpec, Segment, Trajectory, Turn


def segment(parts: Sequence[tuple[int | None, int]], first_id: int = 10) -> Segment:
    """Parts are (turn, or None for given tokens, number of tokens); ids count up."""
    turn_ids = np.concatenate([np.full(n, -1 if t is None else t, np.int32) for t, n in parts])
    mask = turn_ids >= 0
    ids = np.arange(first_id, first_id + len(mask), dtype=np.int32)
    log_probs = np.where(mask, -0.1 * (1 + np.arange(len(mask))), 0).astype(np.float32)
    return Segment(ids, mask, log_probs, np.where(mask, 5, -1).astype(np.int32), turn_ids)


def made(
    segments: Sequence[Segment],
    rewards: Sequence[float],
    uid: str = "maze_3#0",
    penalties: dict[int, float] | None = None,
    **fields: Any,
) -> Trajectory:
    """A trajectory whose turns are the spans of the segments, with a reward each."""
    turns = []
    for number, reward in enumerate(rewards):
        [index] = [i for i, s in enumerate(segments) if (s.turn_ids == number).any()]
        places = np.flatnonzero(segments[index].turn_ids == number)
        penalty = (penalties or {}).get(number, 0.0)
        turn = Turn(
            text=f"turn {number}",
            action=None if penalty else "move up",
            observation=f"seen {number}",
            reward=reward,
            penalty=penalty,
            segment=index,
            start=int(places[0]),
            stop=int(places[-1]) + 1,
            generation_seconds=0.5,
            environment_seconds=0.25,
        )
        turns.append(turn)
    total = sum(rewards)
    usual = Trajectory(
        spec=EpisodeSpec(Task("maze", 3, "maze_3", ground_truth=["move up"]), uid, "maze_3"),
        opening=(Message("user", "Go."),),
        first_observation="Go.",
        turns=tuple(turns),
        segments=tuple(segments),
        env_reward=total,
        success=total >= 1,
        end_reason="done",
    )
    return dataclasses.replace(usual, **fields)


def two_turns(uid: str = "maze_3#0", **fields: Any) -> Trajectory:
    """Given 3, turn of 2, given 2, turn of 3 tokens; rewards 0.25 and 0.75."""
    return made([segment([(None, 3), (0, 2), (None, 2), (1, 3)])], [0.25, 0.75], uid, **fields)


def forked(uid: str = "maze_5#0", **fields: Any) -> Trajectory:
    """Three turns in two segments; the second begins with given tokens of turn 1's."""
    first = segment([(None, 4), (0, 2), (None, 1), (1, 2)])
    second = segment([(None, 7), (2, 4)], first_id=40)
    return made([first, second], [0.5, 0.0, -0.25], uid, **fields)
