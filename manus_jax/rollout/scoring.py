"""Applies reward functions to episodes."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from manus_jax.rewards import RewardError, RewardSettings, compute
from manus_jax.rollout.trajectory import FailedEpisode, Outcome, Trajectory


def score_episode(trajectory: Trajectory, settings: RewardSettings) -> Trajectory:
    """The trajectory with its score; a RewardError names the function and the episode."""
    task = trajectory.task
    score = compute(
        settings,
        trajectory.uid,
        trajectory.said(),
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


def score_episodes(
    outcomes: Sequence[Outcome], settings: RewardSettings, on_error: Literal["raise", "drop"]
) -> list[Outcome]:
    """All outcomes, scored; with "drop", an episode that cannot be scored becomes a failed one."""
    scored: list[Outcome] = []
    for outcome in outcomes:
        if isinstance(outcome, Trajectory):
            try:
                outcome = score_episode(outcome, settings)
            except RewardError as error:
                if on_error == "raise":
                    raise
                outcome = FailedEpisode(outcome.spec, "reward", str(error), outcome.attempts)
        scored.append(outcome)
    return scored
