"""Applies reward functions to episodes."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from manus_jax.rewards import RewardError, RewardSettings, compute
from manus_jax.rollout.trajectory import FailedEpisode, Outcome, Trajectory
from manus_jax.status import STATUS

MAX_CONCURRENT = 32
"""The maximum number of episodes scored concurrently."""


def score_episode(trajectory: Trajectory, settings: RewardSettings) -> Trajectory:
    """Adds the score to a trajectory; a RewardError names the function and the episode."""
    task = trajectory.task
    score = compute(
        settings,
        trajectory.uid,
        trajectory.agent_text,
        task.ground_truth,
        trajectory.turns,
        env_reward=trajectory.env_reward,
        success=trajectory.success,
        env=task.env,
        item_id=task.item_id,
        finish_reason=trajectory.end_reason,
        extra=task.extra,
    )
    return dataclasses.replace(trajectory, score=score)


def score_outcome(
    outcome: Outcome, settings: RewardSettings, on_error: Literal["raise", "drop"]
) -> Outcome:
    """Scores an episode; with "drop", one whose scoring fails becomes a failed episode."""
    if not isinstance(outcome, Trajectory):
        return outcome
    try:
        with STATUS.working(f"reward {settings.function}"):
            return score_episode(outcome, settings)
    except RewardError as error:
        if on_error == "raise":
            raise
        return FailedEpisode(outcome.spec, "reward", str(error), outcome.attempts)


def score_episodes(
    outcomes: Sequence[Outcome], settings: RewardSettings, on_error: Literal["raise", "drop"]
) -> list[Outcome]:
    """Scores all outcomes, in order.

    Episodes are scored concurrently, because a reward function may wait for a server.
    """
    executor = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="reward")
    try:
        return list(executor.map(lambda o: score_outcome(o, settings, on_error), outcomes))
    finally:
        executor.shutdown(cancel_futures=True)
