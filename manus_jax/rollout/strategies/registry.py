"""The registry of rollout strategies, and the function that calls them.

A strategy is a function `(spec, rollout, **parameters)` that plays one `EpisodeSpec` and returns
one outcome, or several of the same group. `rollout.strategy` selects it by name, and
`rollout.strategy_parameters` are its keyword arguments. It runs in the thread of the spec;
`RolloutContext.play` plays an episode from its start to its end, including retries.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import Cancellation, EpisodeCancellation
from manus_jax.errors import UserError
from manus_jax.registry import Registry, parameter_problem
from manus_jax.rollout.episode import play_episode, with_retries
from manus_jax.rollout.player import Agent
from manus_jax.rollout.trajectory import EpisodeSpec, FailedEpisode, Outcome, Trajectory


class StrategyError(UserError, ValueError):
    """A strategy has no such parameter, or cannot be used here."""


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """What a strategy plays with; shared by the episodes that run at the same time."""

    agent: Agent
    pool: EnvironmentPool
    settings: RolloutSettings
    cancellation: Cancellation

    def play(self, spec: EpisodeSpec, attempt: int = 0) -> Outcome:
        """Plays an episode. Attempts at the same spec differ in their uids and random numbers."""
        if attempt:
            spec = dataclasses.replace(spec, uid=f"{spec.uid}~{attempt}")
        return play_episode(spec, self.agent, self.pool, self.settings, self.cancellation)

    def with_retries(
        self, spec: EpisodeSpec, play: Callable[[EpisodeCancellation, int], Trajectory]
    ) -> Outcome:
        """Plays an episode with a loop of the strategy's own, again after infrastructure failures.

        `play` gets the episode's time limit and the number of the attempt, from 1.
        """
        return with_retries(spec, self.pool, self.settings, self.cancellation, play)


Strategy = Callable[..., Outcome | Sequence[Outcome]]
"""(spec, rollout context, **parameters) → the outcomes. One that returns several gives each of them
the group of the spec and a uid of its own."""

STRATEGIES: Registry[Strategy] = Registry("rollout strategy")


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a strategy declares beside its parameters.

    `check` raises ValueError for values of the parameters that make no sense, `check_service` a
    UserError if a server that the strategy calls does not answer; `episodes` is the number of
    episodes that a spec yields, at most. All of them get all parameters. `in_validation`:
    whether the validations of a training run use the strategy, or play plain episodes. `replays`:
    whether it needs environments in which actions can be replayed.
    """

    check: Callable[..., None] = lambda **parameters: None
    check_service: Callable[..., None] = lambda **parameters: None
    episodes: Callable[..., int] = lambda **parameters: 1
    in_validation: bool = True
    replays: bool = False


S = TypeVar("S", bound=Strategy)


def declares(**facts: Any) -> Callable[[S], S]:
    """Decorator: declares the facts of `Declared` about a strategy."""

    def declare(strategy: S) -> S:
        strategy.declared = Declared(**facts)  # type: ignore[attr-defined]
        return strategy

    return declare


def declared(name: str) -> Declared:
    """What the strategy of that name declares."""
    return getattr(STRATEGIES[name], "declared", Declared())


def check_strategy(settings: RolloutSettings, environments: Sequence[str] = ()) -> None:
    """Raises for an unknown strategy, parameters that it does not accept, or an environment in
    which it cannot be used."""
    name, given = settings.strategy, settings.strategy_parameters
    what = f"rollout strategy {name!r}"
    if problem := parameter_problem(what, STRATEGIES[name], given, skip=2):
        raise StrategyError(problem)
    try:
        declared(name).check(**_parameters(settings))
    except ValueError as error:
        raise StrategyError(f"{what}: {error}") from None
    for env in environments if declared(name).replays else ():
        if environment(env).lasting_effects:
            raise StrategyError(
                f"{what} replays actions in fresh sessions, and actions in {env} have effects that "
                "last beyond their session"
            )


def check_strategy_service(settings: RolloutSettings) -> None:
    """Raises if a server that the strategy calls does not answer."""
    declared(settings.strategy).check_service(**_parameters(settings))


def episodes_per_spec(settings: RolloutSettings) -> int:
    """The number of episodes that one spec yields, at most; checks the strategy."""
    check_strategy(settings)
    return declared(settings.strategy).episodes(**_parameters(settings))


def plain_episodes(settings: RolloutSettings) -> RolloutSettings:
    """The settings with the default strategy: one episode per spec."""
    return dataclasses.replace(settings, strategy="episode", strategy_parameters={})


def for_validation(settings: RolloutSettings) -> RolloutSettings:
    """The settings of a training run's validations."""
    return settings if declared(settings.strategy).in_validation else plain_episodes(settings)


def play_spec(spec: EpisodeSpec, rollout: RolloutContext) -> list[Outcome]:
    """Plays a spec with the strategy of the settings."""
    settings = rollout.settings
    what = f"the rollout strategy {settings.strategy!r}"
    played = STRATEGIES[settings.strategy](spec, rollout, **settings.strategy_parameters)
    outcomes = [*played] if isinstance(played, Sequence) else [played]
    for outcome in outcomes:
        if not isinstance(outcome, Trajectory | FailedEpisode):
            raise ValueError(f"{what} returned {outcome!r:.80}, which is not an episode")
    most = declared(settings.strategy).episodes(**_parameters(settings))
    if not 1 <= len(outcomes) <= most:
        raise ValueError(f"{what} returned {len(outcomes)} episodes and declares 1 to {most}")
    if len({outcome.spec.uid for outcome in outcomes}) < len(outcomes):
        raise ValueError(f"{what} returned two episodes with the same uid: number its attempts")
    return outcomes


def _parameters(settings: RolloutSettings) -> Mapping[str, Any]:
    """The parameters of the strategy, defaults included."""
    strategy = STRATEGIES[settings.strategy]
    bound = inspect.signature(strategy).bind(None, None, **settings.strategy_parameters)
    bound.apply_defaults()
    return dict([*bound.arguments.items()][2:])
