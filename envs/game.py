"""What an environment is, apart from HTTP: one session's game, and the spec that makes it a server.

The one idea: a game is plain Python that turns an action string into a `Step`. Everything that
AgentGym's protocol adds (ids, routes, field names, error shapes) is either a default of the id
family or a small pure function in the environment's `EnvironmentSpec`, so that `envs.server` serves
every environment alike.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel


class GameError(Exception):
    """A request the game refuses: unknown item, step before reset, step after the end.

    Never raised for an action that merely makes no sense: that is the agent's affair and gets an
    observation. The server answers a GameError in the error shape of the environment's id family.
    """


@dataclass(frozen=True)
class Step:
    """The outcome of one action; `info` holds what one environment answers beyond the rest."""

    observation: str
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class Game(Protocol):
    """One session's game. It owns its random state: the same item plays the same way anywhere."""

    def reset(self, item: int) -> str:
        """Start `item` and return its first observation; GameError for an unknown item."""
        ...

    def step(self, action: str) -> Step:
        """Play one action; GameError before the first reset and after the end."""
        ...

    def observation(self) -> str:
        """The newest observation; GameError before the first reset."""
        ...

    def close(self) -> None:
        """Free what the game holds (a process, a connection). Called once, at the very end."""
        ...


@dataclass(frozen=True)
class Move:
    """One turn of an oracle: the reason, and the exact string that goes into `Game.step`."""

    thought: str
    action: str


Policy = Callable[[str], Move]
"""Newest observation → next move. It holds no game, so it plays over HTTP as well as in process."""


@dataclass
class Session:
    """What the server keeps of one live session. Answers read it; only the server writes it."""

    id: int
    game: Game
    item: int | None = None
    last: Step | None = None
    """The outcome of the last step, or of the reset with reward 0; None before the first reset."""
    total_reward: float = 0
    used_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def done(self) -> bool:
        return self.last is not None and self.last.done

    @property
    def current(self) -> Step:
        """`last`, for the answers that exist only after a reset."""
        if self.last is None:
            raise GameError(f"The environment {self.id} has not been reset: call reset first.")
        return self.last


Answer = Callable[[Session], Any]
"""A pure function from the session to the JSON value of a response."""


@dataclass(frozen=True)
class SessionRoute:
    """An extra route of one session. GET takes the id as query parameter, POST in the JSON body."""

    path: str
    answer: Answer
    method: Literal["GET", "POST"] = "GET"


@dataclass(frozen=True)
class StepRoute:
    """An extra POST route that plays the action which `read` finds in the text it is sent."""

    path: str
    read: Callable[[str], str]
    answer: Answer


@dataclass(frozen=True)
class StaticRoute:
    """An extra GET route that belongs to no session."""

    path: str
    answer: Callable[[], Any]


def step_fields(session: Session) -> dict[str, Any]:
    """`{"observation", "reward", "done"}`: how most servers answer a step."""
    step = session.current
    return {"observation": step.observation, "reward": step.reward, "done": step.done}


def observation_field(session: Session) -> dict[str, Any]:
    return {"observation": session.current.observation}


def observation_text(session: Session) -> str:
    return session.game.observation()


def detail_fields(session: Session) -> dict[str, Any]:
    return {**step_fields(session), "deleted": False}


def nothing_missing() -> str | None:
    return None


def fixed_splits(train: Sequence[int], test: Sequence[int]) -> Callable[[str], Sequence[int]]:
    """The `items` function of an environment whose two splits are known sequences."""
    splits = {"train": train, "test": test}

    def items(split: str) -> Sequence[int]:
        if split not in splits:
            raise GameError(f"unknown split {split!r}; there are: {', '.join(splits)}")
        return splits[split]

    return items


@dataclass(frozen=True)
class EnvironmentSpec:
    """All that `envs.server`, `envs.serve` and `envs.traces` know about one environment.

    `family` decides what a create answers by default and how failures look: "id" answers
    HTTP 200 with `{"error": …}`, "env_idx" answers HTTP 500. A body that lacks a field is HTTP 422
    in both.
    """

    name: str
    health: str
    """What `GET /` answers, like "This is environment TextCraft." or "ok"."""
    family: Literal["id", "env_idx"]
    item_field: str
    """The name of the item in the body of /reset: data_idx, game, seed, item_id, session_id, id."""
    new_game: Callable[[], Game]
    items: Callable[[str], Sequence[int]]
    """split ("train" or "test") → items. Disjoint, and the same on every machine."""

    oracle: Callable[[int], Policy] | None = None
    """item → a fresh policy that wins it."""
    prefix: str = ""
    """Goes before every route but the health check: "/maze"."""
    cheap: bool = False
    """Reset and step take far less than a millisecond: run on the event loop, not in a thread."""
    answers_when_done: bool = True
    """Whether observation, detail and the extra routes still answer after the end of an episode."""
    create_body: type[BaseModel] | None = None
    """The obligatory body of /create, if there is one."""
    create_item: Callable[[int, Any], int | None] | None = None
    """(session id, parsed create body) → the item that /create starts at once."""
    default_item: Callable[[Session], int] | None = None
    """The item of a /reset that names none; without it the item is obligatory."""
    create_answer: Answer | None = None
    """None: `{"id": n}` or the bare n, as the family has it."""
    reset_answer: Answer = observation_field
    step_answer: Answer = step_fields
    observation_answer: Answer = observation_text
    detail_answer: Answer | None = None
    """None: the environment has no /detail."""
    routes: tuple[SessionRoute | StepRoute | StaticRoute, ...] = ()
    max_sessions: int = 4096
    """How many live sessions a server of this environment allows unless told otherwise."""
    max_action: int = 16_384
    """Longer actions are cut to so many characters; the game then finds them to be invalid."""
    requirements: Callable[[], str | None] = nothing_missing
    """A sentence on what to install when an extra is missing, else None."""
