"""What an environment is, independent of HTTP: the game of one session, and the environment's spec.

A game is plain Python that turns an action string into a `Step`. Everything that AgentGym's
protocol adds (ids, routes, field names, error shapes) is either a default of the id family or a
small pure function in the `EnvironmentSpec`, so `envs.server` serves all environments with the same
code.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel


class GameError(Exception):
    """A request that the game rejects: unknown item, step before reset, step after the end.

    An invalid action is not a GameError; the agent gets an observation instead. The server reports
    a GameError in the error shape of the environment's id family.
    """


@dataclass(frozen=True)
class Step:
    """The outcome of one action; `info` holds fields specific to one environment."""

    observation: str
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class Game(Protocol):
    """The game of one session. It owns its random state: an item plays the same way everywhere."""

    def reset(self, item: int) -> str:
        """Starts `item` and returns its first observation; GameError for an unknown item."""
        ...

    def step(self, action: str) -> Step:
        """Plays one action; GameError before the first reset and after the end."""
        ...

    def observation(self) -> str:
        """The latest observation; GameError before the first reset."""
        ...

    def close(self) -> None:
        """Releases what the game holds (a process, a connection). Called once, at the end."""
        ...


@dataclass(frozen=True)
class Move:
    """One turn of an oracle: the reason, and the exact string to pass to `Game.step`."""

    thought: str
    action: str


Policy = Callable[[str], Move]
"""Latest observation → next move. It needs no game, so it can play over HTTP as well."""

PlausibleActions = Callable[[Sequence[str]], Sequence[str]]
"""All observations of an episode so far → actions that make sense now, at least one."""


@dataclass
class Session:
    """The server's state of one live session. Only the server modifies it."""

    id: int
    number: int
    """How many sessions the server had created before this one."""
    client: str
    """The address that created the session."""
    game: Game
    item: int | None = None
    last: Step | None = None
    """The last step; after a reset, its observation with reward 0; None before the first reset."""
    total_reward: float = 0
    used_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def done(self) -> bool:
        return self.last is not None and self.last.done

    @property
    def current(self) -> Step:
        """`last`, for responses that need a reset first."""
        if self.last is None:
            raise GameError(f"The environment {self.id} has not been reset: call reset first.")
        return self.last


Answer = Callable[[Session], Any]
"""Session → the JSON value of a response."""


@dataclass(frozen=True)
class SessionRoute:
    """An extra route of a session. GET takes the id as query parameter, POST in the JSON body."""

    path: str
    answer: Answer
    method: Literal["GET", "POST"] = "GET"


@dataclass(frozen=True)
class StepRoute:
    """An extra POST route that plays the action that `read` extracts from the text sent."""

    path: str
    read: Callable[[str], str]
    answer: Answer


@dataclass(frozen=True)
class StaticRoute:
    """An extra GET route without a session."""

    path: str
    answer: Callable[[], Any]


def step_fields(session: Session) -> dict[str, Any]:
    """`{"observation", "reward", "done"}`: the step response of most servers."""
    step = session.current
    return {"observation": step.observation, "reward": step.reward, "done": step.done}


def observation_field(session: Session) -> dict[str, Any]:
    return {"observation": session.current.observation}


def observation_pair(session: Session) -> list[Any]:
    """`[observation, null]`: the reset response of webshop and sqlgym."""
    return [session.current.observation, None]


def observation_text(session: Session) -> str:
    return session.game.observation()


def detail_fields(session: Session) -> dict[str, Any]:
    return {**step_fields(session), "deleted": False}


def nothing_missing() -> str | None:
    return None


def fixed_splits(train: Sequence[int], test: Sequence[int]) -> Callable[[str], Sequence[int]]:
    """The `items` function of an environment whose splits are two known sequences."""
    splits = {"train": train, "test": test}

    def items(split: str) -> Sequence[int]:
        if split not in splits:
            raise GameError(f"unknown split {split!r}; there are: {', '.join(splits)}")
        return splits[split]

    return items


@dataclass(frozen=True)
class ClientTool:
    """An action as a function; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ClientView:
    """What clients need to know about an adapted environment: its rules, actions and rewards.

    The value of a step is the reward so far; it is cut to `low..high` and divided by `high`.
    """

    instruction: str
    actions: tuple[str, ...]
    low: float = -math.inf
    high: float = 1.0
    read_timeout: float = 60.0
    """Seconds that a step may take."""
    tools: tuple[ClientTool, ...] = ()
    """If there are any, an action is the call of one: "NAME with Action Input: {json}"."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment: its game, items and players, and how it is served.

    `family` determines the default response to /create and the form of failures: HTTP 200 with
    `{"error": …}` for "id", HTTP 500 for "env_idx". A body without a required field is HTTP 422 in
    both.
    """

    name: str
    health: str
    """The response to `GET /`, such as "This is environment TextCraft." or "ok"."""
    family: Literal["id", "env_idx"]
    item_field: str
    """The field of the item in a /reset body: data_idx, game, seed, item_id, session_id, id."""
    new_game: Callable[[], Game]
    items: Callable[[str], Sequence[int]]
    """split ("train" or "test") → items. Disjoint, and the same on every machine."""
    item_count: Callable[[], int] | None = None
    """Reset accepts 0 to `item_count() - 1`; None: any item, or not known before it is played."""

    oracle: Callable[[int], Policy] | None = None
    """item → a new policy that wins it."""
    plausible_actions: PlausibleActions | None = None
    """What a random policy chooses from; None: the actions that the agent's prompt shows."""
    prefix: str = ""
    """Precedes every route except the health check, such as "/maze"."""
    cheap: bool = False
    """Reset and step take well under a millisecond, so they run on the event loop, not a thread."""
    answers_when_done: bool = True
    """Whether observation, detail and the extra routes still work after the end of an episode."""
    create_body: type[BaseModel] | None = None
    """The required body of /create, if there is one."""
    create_item: Callable[[Session, Any], int | None] | None = None
    """(session, parsed create body) → the item that /create starts, if any."""
    default_item: Callable[[Session], int] | None = None
    """The item of a /reset without one; None: the item is required."""
    create_answer: Answer | None = None
    """None: `{"id": n}` or the bare n, depending on the family."""
    reset_answer: Answer = observation_field
    step_answer: Answer = step_fields
    observation_answer: Answer = observation_text
    detail_answer: Answer | None = None
    """None: the environment has no /detail."""
    routes: tuple[SessionRoute | StepRoute | StaticRoute, ...] = ()
    max_sessions: int = 4096
    """The default limit on live sessions of a server."""
    max_action: int = 16_384
    """Actions are cut to this many characters."""
    client: ClientView | None = None
    """For adapted environments, which have no prompt file and no row in the client's table."""
    requirements: Callable[[], str | None] = nothing_missing
    """What to install or fix before the environment can run, in one sentence; else None."""
