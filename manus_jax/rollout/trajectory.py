"""The outcome of an episode: its exact tokens, turns and rewards, or the reason for its failure.

Tokens are stored once, in segments, and a turn is a span of a segment. Most episodes consist of one
append-only segment. When bounded memory or the chat template rewrites the history, the next prompt
starts a new segment in which only the new turns are trained, so that no token is trained twice.
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
"""Why an episode ended: by the environment ("done"), at the turn limit, at the token limit, or by
the player ("gave_up")."""


@dataclasses.dataclass(frozen=True)
class EpisodeSpec:
    """One episode to play. Its random numbers depend on the uid, not on the weights."""

    task: Task
    uid: str
    group_id: str
    """Shared by the episodes of one task whose rewards are compared with each other."""


def episode_specs(
    tasks: Iterable[Task], group_size: int = 1, prefix: str = ""
) -> list[EpisodeSpec]:
    """`group_size` episodes per task, ordered by group; `prefix` keeps uids of batches distinct."""
    if group_size < 1:
        raise ValueError(f"group_size = {group_size}: at least 1")
    groups = (group_specs(t, group_size, f"{prefix}{row}") for row, t in enumerate(tasks))
    return [spec for group in groups for spec in group]


def group_specs(task: Task, group_size: int, name: str) -> list[EpisodeSpec]:
    """The episodes of one task; `name` keeps the uids of groups distinct."""
    group_id = f"{name}:{task.item_id}"
    return [EpisodeSpec(task, f"{group_id}#{member}", group_id) for member in range(group_size)]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of the agent and its result.

    Its tokens, including a sampled end-of-turn token, are `start` to `stop` of segment `segment`.
    `forced` of them end a thought that reached its token limit; they were not sampled. Players
    without tokens have no segments, and their turns have an empty span.
    """

    text: str
    action: str | None  # as sent to the environment; None if the text has no valid action
    observation: str  # the response, as shown to the agent
    reward: float  # change of the episode's environment reward
    penalty: float = 0.0  # for an invalid action; 0 or negative
    rejected: bool = False  # the environment's reply refuses the action
    cut: bool = False  # the turn was truncated at its token limit
    segment: int = 0
    start: int = 0
    stop: int = 0
    forced: int = 0
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0

    @property
    def valid(self) -> bool:
        """Whether the text has an action in the expected form."""
        return self.action is not None

    @property
    def accepted(self) -> bool:
        """Whether the environment carried out an action."""
        return self.valid and not self.rejected


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A sequence of exact tokens; all arrays are [T].

    `loss_mask` marks the tokens sampled by the agent. For all others, `log_probs` is 0, and
    `versions` and `turn_ids` (indexes of the episode's turns) are -1. `experts` are those that the
    engine chose for each token and layer, -1 where they are not known.
    """

    token_ids: np.ndarray  # int32
    loss_mask: np.ndarray  # bool
    log_probs: np.ndarray  # float32, of the distribution that was sampled from
    versions: np.ndarray  # int32, of the weights that sampled the token
    turn_ids: np.ndarray  # int32
    experts: np.ndarray | None = None  # int16 [T, layers, experts per token]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """A completed episode."""

    spec: EpisodeSpec
    opening: tuple[Message, ...]
    first_observation: str
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    env_reward: float
    success: bool
    end_reason: EndReason
    attempts: int = 1
    prompts_extended: int = 0  # prompts that extend all previous tokens
    prompts_forked: int = 0  # prompts with a rewritten history
    score: Score | None = None  # of the reward function; None: the environment reward is used
    parent: str | None = None  # the uid of the episode that it branches from
    branch_turn: int = 0  # the first turn of its own; the turns before it are the parent's

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
        """Process rewards: each turn's part of the episode reward, including penalties."""
        if self.score is None:
            return tuple(turn.reward + turn.penalty for turn in self.turns)
        given = self.score.turn_scores or (0.0,) * len(self.turns)
        return tuple(x + turn.penalty for x, turn in zip(given, self.turns, strict=True))

    @property
    def episode_reward(self) -> float:
        """The reward used for training: the score plus the (negative) penalties."""
        earned = self.env_reward if self.score is None else self.score.total
        return earned + math.fsum(turn.penalty for turn in self.turns)

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """The turns without those of the parent, which are replayed."""
        return self.turns[self.branch_turn :]

    @property
    def agent_tokens(self) -> int:
        return sum(turn.stop - turn.start - turn.forced for turn in self.own_turns)

    @property
    def forked_tokens(self) -> int:
        """Tokens of the history that forks of the stream repeat."""
        return sum(int(segment.loss_mask.argmax()) for segment in self.segments[1:])

    @property
    def observations(self) -> tuple[str, ...]:
        """The observation before each turn."""
        seen = (self.first_observation, *(turn.observation for turn in self.turns))
        return seen[: len(self.turns)]

    @property
    def agent_text(self) -> str:
        """The text of all turns of the agent."""
        return "\n".join(turn.text for turn in self.turns)


@dataclasses.dataclass(frozen=True)
class FailedEpisode:
    """An episode that could not be completed and must not be used for training.

    `kind` is its name in the counters: a kind of EnvironmentFailure, or engine, prompt_too_long,
    overdue, program, reward, cancelled, error.
    """

    spec: EpisodeSpec
    kind: str
    error: str
    attempts: int = 1


Outcome = Trajectory | FailedEpisode


def trajectories(outcomes: Sequence[Outcome]) -> list[Trajectory]:
    """The completed episodes."""
    return [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
