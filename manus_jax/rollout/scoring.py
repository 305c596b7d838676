"""Applies reward functions to episodes."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from manus_jax.rewards import RewardError, RewardSettings, RewardUnavailable, compute
from manus_jax.rewards.registry import Score
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
        first_observation=trajectory.first_observation,
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
    """Scores an episode; with "drop", one whose scoring fails becomes a failed episode.

    An episode whose score is unavailable, because a judge does not answer, is always dropped.
    """
    if not isinstance(outcome, Trajectory):
        return outcome
    try:
        with STATUS.working(f"reward {settings.function}"):
            return score_episode(outcome, settings)
    except RewardError as error:
        if on_error == "raise" and not isinstance(error, RewardUnavailable):
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


def shuffle_rewards(episodes: Sequence[Trajectory], seed: tuple[int, ...]) -> list[Trajectory]:
    """The episodes with their rewards permuted, penalties included.

    A control: the rewards of a step keep their distribution but say nothing about the actions, so
    a policy that improves on them learns from something else.
    """
    order = np.random.default_rng(seed).permutation(len(episodes))
    return [
        dataclasses.replace(
            episode,
            score=Score(episodes[other].episode_reward),
            turns=tuple(dataclasses.replace(turn, penalty=0.0) for turn in episode.turns),
        )
        for episode, other in zip(episodes, order, strict=True)
    ]
