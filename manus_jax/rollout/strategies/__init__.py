"""Rollout strategies by name. Importing the package registers the built-in ones.

A new one is a function decorated with `@STRATEGIES.register("name")`, in a module of this package
or in one of yours that the configuration imports.
"""

from manus_jax.rollout.strategies import best_of_n, episode, program, tree
from manus_jax.rollout.strategies.registry import (
    STRATEGIES,
    RolloutContext,
    StrategyError,
    check_strategy,
    check_strategy_service,
    declares,
    episodes_per_spec,
    for_validation,
    plain_episodes,
    play_spec,
)

__all__ = [
    "STRATEGIES",
    "RolloutContext",
    "StrategyError",
    "best_of_n",
    "check_strategy",
    "check_strategy_service",
    "declares",
    "episode",
    "episodes_per_spec",
    "for_validation",
    "plain_episodes",
    "play_spec",
    "program",
    "tree",
]
