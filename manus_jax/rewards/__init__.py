"""Reward functions by name. Importing the package registers the built-in ones.

A new one is a function decorated with `@REWARDS.register("name")`, in a module of this package or
in one of yours that the configuration imports.
"""

from manus_jax.rewards import composite, ground_truth, judge, text
from manus_jax.rewards.registry import (
    FACTS,
    REWARDS,
    EpisodeTurn,
    RewardError,
    RewardSettings,
    RewardUnavailable,
    Score,
    compute,
    needs_service,
    try_early,
)

__all__ = [
    "FACTS",
    "REWARDS",
    "EpisodeTurn",
    "RewardError",
    "RewardSettings",
    "RewardUnavailable",
    "Score",
    "composite",
    "compute",
    "ground_truth",
    "judge",
    "needs_service",
    "text",
    "try_early",
]
