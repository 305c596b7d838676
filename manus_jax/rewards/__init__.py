"""Reward functions by name. Importing the package registers the built-in ones.

A new one is a function decorated with `@REWARDS.register("name")`, in a module of this package or
in one of yours that the configuration imports.
"""

from manus_jax.rewards import (
    answers,
    composite,
    environment,
    form,
    length,
    reference_actions,
)
from manus_jax.rewards.registry import (
    FACTS,
    REWARDS,
    EpisodeTurn,
    RewardError,
    RewardSettings,
    Score,
    check_parameters,
    compute,
)

__all__ = [
    "FACTS",
    "REWARDS",
    "EpisodeTurn",
    "RewardError",
    "RewardSettings",
    "Score",
    "answers",
    "check_parameters",
    "composite",
    "compute",
    "environment",
    "form",
    "length",
    "reference_actions",
]
