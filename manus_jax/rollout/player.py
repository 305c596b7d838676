"""Who plays: anything that hears observations and answers them, with tokens or with text.

The one idea: the episode loop knows a `Player` and nothing of tokens, engines or oracles. An
`Agent` makes one player per attempt at an episode.
"""

import dataclasses
from typing import Protocol

from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import Cancellation
from manus_jax.rollout.action_formats import ActionFormat
from manus_jax.rollout.prompts import Opening
from manus_jax.rollout.trajectory import EndReason, EpisodeSpec, Segment


@dataclasses.dataclass(frozen=True)
class Answer:
    """A turn: its text and, where it was sampled, its span of tokens (see Turn)."""

    text: str
    cut: bool = False
    segment: int = 0
    start: int = 0
    stop: int = 0


class NoAnswer(Exception):
    """The player has no more to say, or no room to say it in; the episode ends."""

    def __init__(self, reason: EndReason) -> None:
        super().__init__(reason)
        self.reason: EndReason = reason


class Player(Protocol):
    """One side of one episode."""

    prompts_extended: int
    prompts_forked: int

    def hear(self, observation: str) -> str:
        """Takes in an observation; returns it as the player was told it, which may be cut."""

    def answer(self, turn: int) -> Answer:
        """The turn number `turn`; raises NoAnswer."""

    def segments(self) -> tuple[Segment, ...]:
        """The tokens so far, where there are any."""

    def close(self) -> None:
        """The episode is over."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What a player is told of the episode it is to play."""

    spec: EpisodeSpec
    opening: Opening
    action_format: ActionFormat
    settings: RolloutSettings
    cancellation: Cancellation
    attempt: int


class Agent(Protocol):
    """One for all episodes; thread-safe."""

    def check(self, env: str, settings: RolloutSettings) -> None:
        """ValueError for an environment that it cannot play with these settings."""

    def player(self, part: Part) -> Player: ...
