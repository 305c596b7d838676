"""Rewards given by the environment itself: its episode reward, and success or failure."""

from collections.abc import Sequence
from typing import Any

from manus_jax.rewards.registry import REWARDS, EpisodeTurn, Score


@REWARDS.register("env")
def env(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn],
    env_reward: float,
    scale: float = 1.0,
    clip: float | None = None,
    **facts: Any,
) -> Score:
    """The environment's episode reward, multiplied by `scale` and clipped to ±`clip`.

    The share of a turn is the increase of the reward in that turn.
    """
    total = scale * env_reward
    if clip is not None:
        total = min(max(total, -clip), clip)
    return Score(total, {"env": total}, tuple(scale * turn.reward for turn in turns))


@REWARDS.register("goal")
def goal(
    solution_str: str,
    ground_truth: Any,
    *,
    env_reward: float,
    success: bool,
    finish_reason: str,
    won: float = 1.0,
    lost: float = -1.0,
    **facts: Any,
) -> float:
    """`won` for a success, `lost` if the environment ended the episode without a reward.

    Otherwise (partial credit, or a truncated episode) the environment's reward.
    """
    if success:
        return won
    return lost if finish_reason == "done" and env_reward <= 0 else env_reward
