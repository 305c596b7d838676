"""The registry of reward functions, and the function that calls them.

A reward function is `compute_score(solution_str, ground_truth, **kwargs)`, registered with
`@REWARDS.register("name")`. It receives facts about the episode and returns a number, a `Score`
with components, or one number per turn. A failure is never silent: an exception, a NaN or a wrong
type raises a `RewardError` that names the function and the episode, and the caller decides what
happens to the episode.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from manus_jax.errors import UserError
from manus_jax.registry import Registry, RegistryError, parameter_problem

FACTS: Mapping[str, str] = {
    "turns": "the agent's turns (see EpisodeTurn), in order",
    "first_observation": "what the agent saw before its first turn",
    "env_reward": "the environment's reward of the episode, on a scale whose best is 1",
    "success": "whether the environment counts the episode as won",
    "env": "the environment's name",
    "item_id": "the task's id, such as textcraft_31",
    "finish_reason": "why the episode ended: done, max_turns, context or gave_up",
    "extra": "the other columns of the dataset's row",
}
"""What every reward function is given by keyword, beside `solution_str`, all that the agent said
(its turns, a newline between them), and `ground_truth`, as the dataset has it."""


class EpisodeTurn(Protocol):
    """One turn of the agent, as a reward function sees it."""

    @property
    def text(self) -> str: ...

    @property
    def action(self) -> str | None:
        """What was sent to the environment; None where the text held no valid action."""

    @property
    def valid(self) -> bool: ...

    @property
    def observation(self) -> str:
        """What came back."""

    @property
    def reward(self) -> float:
        """By how much the environment's reward of the episode grew."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A reward, its parts (they become the metrics `reward/<component>`), and its share per turn.

    `turn_scores` are process rewards, one per turn; what they leave of the total belongs to the
    whole episode.
    """

    total: float
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    turn_scores: tuple[float, ...] | None = None


class RewardError(UserError, RuntimeError):
    """A reward function failed on an episode, or has no such parameter."""


class RewardUnavailable(RewardError):
    """The score of an episode could not be obtained, for example from a judge; it is dropped."""


RewardFunction = Callable[..., "float | Score | Sequence[float]"]
F = TypeVar("F", bound=RewardFunction)
REWARDS: Registry[RewardFunction] = Registry("reward function")


def try_early(function: F) -> F:
    """Decorator: tries the parameters, and the tasks, on an empty episode before a run starts.

    For functions that are fast and have no side effects.
    """
    function.try_early = True  # type: ignore[attr-defined]
    return function


def needs_service(check: Callable[..., None]) -> Callable[[F], F]:
    """Decorator for a function that calls a server.

    `check` gets the parameters of a configuration, and raises RewardError unless the server
    answers. It is called once, before a run starts.
    """

    def declare(function: F) -> F:
        function.check_service = check  # type: ignore[attr-defined]
        return function

    return declare


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """A reward function by name, with the constants it is to use instead of its defaults."""

    function: str = "env"
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        function = REWARDS[self.function]
        what = f"reward function {self.function!r}"
        if problem := parameter_problem(what, function, self.parameters, skip=2, given=FACTS):
            raise RewardError(problem)
        self.try_task("(check)", "a", env="", extra={})

    def check_service(self) -> None:
        """Raises RewardError if a server that the function calls does not answer."""
        if check := getattr(REWARDS[self.function], "check_service", None):
            check(**self.parameters)

    def try_task(
        self, item_id: str, ground_truth: Any, *, env: str | None, extra: Mapping[str, Any]
    ) -> None:
        """Raises RewardError if no episode of a task could be scored, where that can be tried."""
        if getattr(REWARDS[self.function], "try_early", False):
            facts: dict[str, Any] = {"env_reward": 0.0, "success": False, "finish_reason": "done"}
            facts |= {"env": env, "item_id": item_id, "extra": extra, "first_observation": ""}
            compute(self, item_id, "<think>a</think><answer>a</answer>", ground_truth, **facts)


def compute(
    settings: RewardSettings,
    episode: str,
    solution_str: str,
    ground_truth: Any,
    turns: Sequence[EpisodeTurn] = (),
    **facts: Any,
) -> Score:
    """The score of one episode, called `episode` in errors; `facts` are those of FACTS."""
    function = REWARDS[settings.function]
    where = f"reward function {settings.function!r} failed on episode {episode}"
    try:
        result = function(solution_str, ground_truth, turns=turns, **facts, **settings.parameters)
    except (RewardError, RegistryError):
        raise  # of a part of the function
    except Exception as error:  # anything that a user's function raises is reported as its failure
        raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
    try:
        return _checked(settings.function, result, len(turns))
    except ValueError as error:
        raise RewardError(f"{where}: {error}") from None


def _checked(name: str, result: Any, turns: int) -> Score:
    """The result as a Score whose numbers are all finite."""
    if isinstance(result, Score):
        given = result.turn_scores
        per_turn = None if given is None else tuple(_number("turn score", x) for x in given)
        parts = {key: _number(f"component {key!r}", x) for key, x in result.components.items()}
        score = Score(_number("total", result.total), parts, per_turn)
    elif isinstance(result, Sequence) and not isinstance(result, str | bytes):
        per_turn = tuple(_number("turn score", x) for x in result)
        score = Score(math.fsum(per_turn), {}, per_turn)
    else:
        score = Score(_number("score", result))
    if score.turn_scores is not None and len(score.turn_scores) != turns:
        raise ValueError(f"it gave {len(score.turn_scores)} turn scores for {turns} turns")
    return score if score.components else dataclasses.replace(score, components={name: score.total})


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"its {what} is not a number but {type(value).__name__}") from None
    if not math.isfinite(number):
        raise ValueError(f"its {what} is {number}")
    return number
