"""Plays one episode: leases an environment, plays it turn by turn, returns the outcome.

The outcome is a `Trajectory`, which can be used for training, or a `FailedEpisode`, which cannot.
Agent errors (no action, an invalid one, too many tokens) are part of a trajectory. After an
infrastructure failure the episode is restarted on a fresh environment; if all attempts fail, it
becomes a `FailedEpisode`, never a reward of zero.
"""

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from manus_jax.agentgym.client import StepResult
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.server_state import health_policy
from manus_jax.agentgym.table import EnvironmentRow, environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import (
    Cancellation,
    Cancelled,
    EpisodeCancellation,
    Overdue,
)
from manus_jax.engines.protocol import EngineError
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.player import Agent, EndEpisode, EpisodeContext, Player
from manus_jax.rollout.prompts import TurnPrompt, cut_middle, opening, turn_prompt
from manus_jax.rollout.trajectory import (
    EndReason,
    EpisodeSpec,
    FailedEpisode,
    Outcome,
    Trajectory,
    Turn,
)


class PromptTooLong(Exception):
    """The opening messages leave no room for a turn."""


class AttemptFailed(Exception):
    """An attempt that cannot be used for training, for a reason of the strategy's own."""

    def __init__(self, kind: str, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.kind, self.retryable = kind, retryable


def play_episode(
    spec: EpisodeSpec,
    agent: Agent,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    cancellation: Cancellation | None = None,
) -> Outcome:
    """Plays an episode, with up to `pool.settings.attempts` attempts on infrastructure failures."""

    def play(limited: EpisodeCancellation, attempt: int) -> Trajectory:
        context = episode_context(spec, settings, limited, attempt)
        assert spec.task.env is not None
        with pool.lease(spec.task.env, limited.begin) as session:
            player = agent.player(context)
            try:
                return play_turns(context, session, player, start_game(context, session, player))
            finally:
                player.close()

    return with_retries(spec, pool, settings, cancellation or Cancellation(), play)


def with_retries(
    spec: EpisodeSpec,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    cancellation: Cancellation,
    play: Callable[[EpisodeCancellation, int], Trajectory],
) -> Outcome:
    """Calls `play(cancellation, attempt)`, again after infrastructure failures.

    All attempts together take at most `settings.episode_timeout` seconds, from the first session.
    """
    limited = EpisodeCancellation(cancellation, settings.episode_timeout)
    attempt = 0
    while True:
        attempt += 1
        try:
            if attempt > 1:
                back_off = health_policy(pool.settings).back_off
                limited.sleep(back_off.seconds(attempt - 1, random.random()))
            limited.check()
            return play(limited, attempt)
        except EnvironmentFailure as failure:
            kind = str(failure.kind if failure.refused_item is None else FailureKind.ITEM)
            error, retryable = str(failure), failure.retryable
        except EngineError as failure:
            kind, error, retryable = "engine", str(failure), True
        except PromptTooLong as failure:
            kind, error, retryable = "prompt_too_long", str(failure), False
        except AttemptFailed as failure:
            kind, error, retryable = failure.kind, str(failure), failure.retryable
        except Overdue as failure:
            kind, error, retryable = "overdue", str(failure), False
        except Cancelled:
            return FailedEpisode(spec, "cancelled", "the run was cancelled", attempt)
        if not retryable or attempt >= pool.settings.attempts:
            return FailedEpisode(spec, kind, error, attempt)


class Game(Protocol):
    """The part of a session that an episode uses."""

    @property
    def row(self) -> EnvironmentRow: ...

    @property
    def episode_reward(self) -> float: ...

    @property
    def success(self) -> bool: ...

    @property
    def available_actions(self) -> tuple[str, ...]: ...

    def reset(self, item: int) -> str: ...

    def step(self, action: str) -> StepResult: ...


def episode_context(
    spec: EpisodeSpec, settings: RolloutSettings, cancellation: EpisodeCancellation, attempt: int
) -> EpisodeContext:
    """What a player knows about an attempt at an episode."""
    assert spec.task.env is not None
    action_format = format_for(environment(spec.task.env), settings.action_format)
    beginning = opening(spec.task, action_format, settings)
    return EpisodeContext(spec, beginning, action_format, settings, cancellation, attempt)


def start_game(context: EpisodeContext, session: Game, player: Player) -> str:
    """Starts the game; returns the first observation as the player sees it."""
    assert context.spec.task.item is not None
    seen = session.reset(context.spec.task.item)
    seen = cut_middle(seen, context.settings.max_observation_chars)
    return player.observe(seen, prompt=_prompt(context, session, [], []))


def _prompt(
    context: EpisodeContext, session: Game, seen: Sequence[str], actions: Sequence[str | None]
) -> TurnPrompt | None:
    """The prompt of the next turn, if turns have prompts of their own."""
    if context.settings.prompt_source != "per_turn":
        return None
    assert context.spec.task.env is not None
    return functools.partial(
        turn_prompt,
        PROMPTS[context.spec.task.env],
        context.action_format,
        seen,
        actions,
        session.available_actions,
        context.settings.memory_turns,
    )


def play_turns(
    context: EpisodeContext,
    session: Game,
    player: Player,
    first_observation: str,
    before: Sequence[Turn] = (),
) -> Trajectory:
    """Plays to the end of the episode; `before` are the turns that have been played already."""
    settings, turns = context.settings, [*before]
    end_reason: EndReason = "max_turns"
    while len(turns) < settings.max_turns and end_reason != "done":
        context.cancellation.check()
        began = time.perf_counter()
        try:
            answer = player.act(len(turns))
        except EndEpisode as end:
            if end.reason == "context" and not turns:
                raise PromptTooLong(
                    f"{context.spec.uid}: the opening of {context.spec.task.item_id} leaves no "
                    "room for a turn; raise rollout.max_total_tokens, or lower "
                    "rollout.max_observation_tokens"
                ) from None
            end_reason = end.reason
            break
        answered = time.perf_counter()
        parsed = context.action_format.parse(answer.text, session.row.action, answer.cut)
        rejected = False
        if parsed.action is None:
            observation, reward, penalty = parsed.error, 0.0, -settings.invalid_action_penalty
        else:
            result = session.step(parsed.action)
            observation, reward, penalty = result.observation, result.reward, 0.0
            rejected = observation.startswith(session.row.rejections)
            if result.done:
                end_reason = "done"
        stepped = time.perf_counter()
        observation = cut_middle(observation, settings.max_observation_chars)
        if end_reason != "done" and len(turns) + 1 < settings.max_turns:
            seen = [first_observation, *(turn.observation for turn in turns)]
            actions = [*(turn.action for turn in turns), parsed.action]
            observation = player.observe(
                observation,
                replies=parsed.valid,
                prompt=_prompt(context, session, seen, actions),
            )
        turns.append(
            Turn(
                text=answer.text,
                action=parsed.action,
                observation=observation,
                reward=reward,
                penalty=penalty,
                rejected=rejected,
                cut=answer.cut,
                segment=answer.segment,
                start=answer.start,
                stop=answer.stop,
                forced=answer.forced,
                generation_seconds=answered - began,
                environment_seconds=stepped - answered,
            )
        )
    return Trajectory(
        spec=context.spec,
        opening=context.opening.messages(first_observation),
        first_observation=first_observation,
        turns=tuple(turns),
        segments=player.segments(),
        env_reward=session.episode_reward,
        success=session.success,
        end_reason=end_reason,
        attempts=context.attempt,
        prompts_extended=player.prompts_extended,
        prompts_forked=player.prompts_forked,
    )
