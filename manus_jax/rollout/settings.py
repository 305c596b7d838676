"""How episodes are played: limits, sampling, prompts, memory and patience, in one frozen object."""

import dataclasses

from manus_jax.engines.protocol import Sampling
from manus_jax.rollout.prompts import PromptSettings


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """Everything an episode needs to know but its task.

    `sampling.max_tokens` bounds one turn. All tokens of an episode, prompt included, stay within
    `max_total_tokens` and the engine's own context; a turn is not begun with less room than
    `min_turn_tokens`. Observations longer than the bounds are cut in the middle, and say so.
    """

    seed: int = 0
    max_turns: int = 30
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_total_tokens: int = 4096
    min_turn_tokens: int = 16
    max_observation_tokens: int = 1024
    max_observation_chars: int = 20_000
    memory_turns: int | None = None  # turns kept word for word besides the opening; None: all
    action_format: str = "auto"  # the environment's own, or a name of actions.FORMATS
    prompt: PromptSettings = dataclasses.field(default_factory=PromptSettings)
    invalid_action_penalty: float = 0.0  # taken off the reward of a turn without a valid action
    generation_timeout: float = 600.0  # seconds for one turn of the model's
    max_in_flight: int = 1024  # episodes played at the same time

    def __post_init__(self) -> None:
        at_least = {
            "max_turns": 1,
            "max_total_tokens": 2,
            "min_turn_tokens": 1,
            "max_observation_tokens": 1,
            "max_observation_chars": 1,
            "memory_turns": 0,
            "invalid_action_penalty": 0,
            "max_in_flight": 1,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} = {value}: it must be at least {least}")
        if self.sampling.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens = {self.sampling.max_tokens}: at least 1")
        if self.generation_timeout <= 0:
            raise ValueError(f"generation_timeout = {self.generation_timeout}: must be positive")
