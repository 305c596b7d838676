"""Reward functions by name; importing the package registers the built-in ones.

To add one, decorate a function with `@register_reward("name")`, in this package or in a module that
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
