"""The interface between the episode loop and its players: a model, an oracle, a random policy.

The episode loop depends only on `Player`, not on tokens or engines. An `Agent` creates one player
per attempt at an episode.
"""

import dataclasses
from typing import Protocol

from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import EpisodeCancellation
from manus_jax.rollout.action_formats import ActionFormat
from manus_jax.rollout.prompts import Opening, TurnPrompt
from manus_jax.rollout.trajectory import EndReason, EpisodeSpec, Segment


@dataclasses.dataclass(frozen=True)
class Answer:
    """The text of a turn and, if it was sampled, its span of tokens (see Turn)."""

    text: str
    cut: bool = False
    segment: int = 0
    start: int = 0
    stop: int = 0
    forced: int = 0


class EndEpisode(Exception):
    """Raised to end the episode: the player gives up or has no room for another turn."""

    def __init__(self, reason: EndReason) -> None:
        super().__init__(reason)
        self.reason: EndReason = reason


class Player(Protocol):
    """Plays one attempt at one episode."""

    prompts_extended: int
    prompts_forked: int

    def observe(
        self, observation: str, replies: bool = False, prompt: TurnPrompt | None = None
    ) -> str:
        """Adds an observation; returns it as the player sees it, possibly truncated.

        `replies`: it is the environment's reply to a valid action. `prompt` writes the prompt of
        the next turn, if that does not continue the conversation.
        """

    def act(self, turn: int) -> Answer:
        """Generates turn number `turn`; may raise EndEpisode."""

    def segments(self) -> tuple[Segment, ...]:
        """The tokens so far; empty for players without tokens."""

    def close(self) -> None:
        """Frees the player's resources; called once, at the end of the attempt."""


@dataclasses.dataclass(frozen=True)
class EpisodeContext:
    """The information that a player gets about its episode."""

    spec: EpisodeSpec
    opening: Opening
    action_format: ActionFormat
    settings: RolloutSettings
    cancellation: EpisodeCancellation
    attempt: int


class Agent(Protocol):
    """Creates players. Thread-safe; one instance is used for all episodes."""

    def check(self, env: str, settings: RolloutSettings) -> None:
        """Raises ValueError if the agent cannot play the environment with these settings."""

    def player(self, context: EpisodeContext) -> Player: ...
