"""Reward functions by name: importing the package registers all that come with it.

A new one is a function under `@register_reward("name")`, in a module here or in one of yours that
the configuration imports.
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
    EpisodeTurn,
    RewardError,
    RewardSettings,
    Score,
    compute,
    register_reward,
    reward_function,
    reward_names,
)

__all__ = [
    "FACTS",
    "EpisodeTurn",
    "RewardError",
    "RewardSettings",
    "Score",
    "answers",
    "composite",
    "compute",
    "environment",
    "form",
    "length",
    "reference_actions",
    "register_reward",
    "reward_function",
    "reward_names",
]
