"""What an episode leaves behind: its exact tokens, its turns, its rewards; or why there is nothing.

The one idea: tokens are kept once, in segments, and a turn is a span of a segment. Most episodes
are one segment that only grew. Where memory rewrites the history, the next prompt is a new segment
in which only the new turn is trained, so that no token is trained twice.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.rewards.registry import Score

EndReason = Literal["done", "max_turns", "context", "gave_up"]
"""Why an episode ended: the environment said so; a limit on turns or tokens; the policy had no
more to say."""


@dataclasses.dataclass(frozen=True)
class EpisodeSpec:
    """One episode to play. The same uid draws the same random numbers, whatever the weights."""

    task: Task
    uid: str
    group_id: str
    """Episodes of one task whose rewards are compared with each other."""


def episode_specs(
    tasks: Iterable[Task], group_size: int = 1, prefix: str = ""
) -> list[EpisodeSpec]:
    """`group_size` episodes of every task, group by group; `prefix` tells batches apart."""
    if group_size < 1:
        raise ValueError(f"group_size = {group_size}: at least 1")
    return [
        EpisodeSpec(task, f"{prefix}{row}:{task.item_id}#{member}", f"{prefix}{row}:{task.item_id}")
        for row, task in enumerate(tasks)
        for member in range(group_size)
    ]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of the agent and what came of it.

    Its tokens, the end-of-turn token that was sampled included, are `start` to `stop` of segment
    `segment`. A policy that speaks text has no segments; its turns have an empty span.
    """

    text: str
    action: str | None  # what was sent; None where the text held no valid action
    observation: str  # the answer, as the agent was told it
    reward: float  # growth of the environment's reward of the episode
    penalty: float = 0.0  # 0 or negative: for an invalid action
    cut: bool = False  # the turn met its limit of tokens before it ended
    segment: int = 0
    start: int = 0
    stop: int = 0
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0

    @property
    def valid(self) -> bool:
        return self.action is not None


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A stream of exact tokens, [T] each.

    `loss_mask` marks the agent's own sampled tokens; on all others `log_probs` is 0, and `versions`
    and `turn_ids` (numbers of the episode's turns) are -1.
    """

    token_ids: np.ndarray  # int32
    loss_mask: np.ndarray  # bool
    log_probs: np.ndarray  # float32, of the distribution that was sampled from
    versions: np.ndarray  # int32, of the weights that sampled the token
    turn_ids: np.ndarray  # int32

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode that was played to an end."""

    spec: EpisodeSpec
    opening: tuple[Message, ...]
    first_observation: str
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    env_reward: float
    success: bool
    end_reason: EndReason
    attempts: int = 1
    prompts_extended: int = 0  # prompts that began with all the tokens before them
    prompts_forked: int = 0  # prompts that rewrote history
    score: Score | None = None  # the reward function's; None: the environment's own reward counts

    @property
    def uid(self) -> str:
        return self.spec.uid

    @property
    def group_id(self) -> str:
        return self.spec.group_id

    @property
    def task(self) -> Task:
        return self.spec.task

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Process rewards: each turn's share of the episode's reward, penalties included."""
        if self.score is None:
            return tuple(turn.reward + turn.penalty for turn in self.turns)
        given = self.score.turn_scores or (0.0,) * len(self.turns)
        return tuple(x + turn.penalty for x, turn in zip(given, self.turns, strict=True))

    @property
    def episode_reward(self) -> float:
        """What the episode is trained on: the score, less the penalties for invalid actions."""
        earned = self.env_reward if self.score is None else self.score.total
        return earned + math.fsum(turn.penalty for turn in self.turns)

    @property
    def agent_tokens(self) -> int:
        return sum(turn.stop - turn.start for turn in self.turns)

    @property
    def observations(self) -> tuple[str, ...]:
        """The observation that each turn answers."""
        seen = (self.first_observation, *(turn.observation for turn in self.turns))
        return seen[: len(self.turns)]

    def said(self) -> str:
        """All that the agent said."""
        return "\n".join(turn.text for turn in self.turns)


@dataclasses.dataclass(frozen=True)
class FailedEpisode:
    """An episode that came to no end and must not be trained on.

    `kind` is the name under which it is counted: a kind of EnvironmentFailure, or engine,
    prompt_too_long, reward, cancelled, error.
    """

    spec: EpisodeSpec
    kind: str
    error: str
    attempts: int = 1


Outcome = Trajectory | FailedEpisode


def trajectories(outcomes: Sequence[Outcome]) -> list[Trajectory]:
    """The episodes that were played to an end."""
    return [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
