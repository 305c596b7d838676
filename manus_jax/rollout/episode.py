"""Plays one episode: leases an environment, plays it turn by turn, returns the outcome.

The outcome is a `Trajectory`, which can be used for training, or a `FailedEpisode`, which cannot.
Agent errors (no action, an invalid one, too many tokens) are part of a trajectory. After an
infrastructure failure the episode is restarted on a fresh environment; if all attempts fail, it
becomes a `FailedEpisode`, never a reward of zero.
"""

import random
import time

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.server_state import health_policy
from manus_jax.agentgym.table import environment
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
from manus_jax.rollout.prompts import cut_middle, opening
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


def play_episode(
    spec: EpisodeSpec,
    agent: Agent,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    cancellation: Cancellation | None = None,
) -> Outcome:
    """Plays an episode, with up to `pool.settings.attempts` attempts on infrastructure failures.

    All attempts together take at most `settings.episode_timeout` seconds.
    """
    limited = EpisodeCancellation(cancellation or Cancellation(), settings.episode_timeout)
    attempt = 0
    while True:
        attempt += 1
        try:
            if attempt > 1:
                back_off = health_policy(pool.settings).back_off
                limited.sleep(back_off.seconds(attempt - 1, random.random()))
            return _attempt(spec, agent, pool, settings, limited, attempt)
        except EnvironmentFailure as failure:
            kind = str(failure.kind if failure.refused_item is None else FailureKind.ITEM)
            error, retryable = str(failure), failure.retryable
        except EngineError as failure:
            kind, error, retryable = "engine", str(failure), True
        except PromptTooLong as failure:
            kind, error, retryable = "prompt_too_long", str(failure), False
        except Overdue as failure:
            kind, error, retryable = "overdue", str(failure), False
        except Cancelled:
            return FailedEpisode(spec, "cancelled", "the run was cancelled", attempt)
        if not retryable or attempt >= pool.settings.attempts:
            return FailedEpisode(spec, kind, error, attempt)


def _attempt(
    spec: EpisodeSpec,
    agent: Agent,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    cancellation: EpisodeCancellation,
    attempt: int,
) -> Trajectory:
    task = spec.task
    assert task.env is not None
    action_format = format_for(environment(task.env), settings.action_format)
    beginning = opening(task, action_format, settings)
    context = EpisodeContext(spec, beginning, action_format, settings, cancellation, attempt)
    cancellation.check()
    with pool.lease(task.env) as session:
        player = agent.player(context)
        try:
            return _play(context, session, player)
        finally:
            player.close()


def _play(context: EpisodeContext, session: Session, player: Player) -> Trajectory:
    settings, item = context.settings, context.spec.task.item
    assert item is not None
    turns: list[Turn] = []
    end_reason: EndReason = "max_turns"
    seen = session.reset(item)
    first_observation = player.observe(cut_middle(seen, settings.max_observation_chars))
    while len(turns) < settings.max_turns and end_reason != "done":
        context.cancellation.check()
        began = time.perf_counter()
        try:
            answer = player.act(len(turns))
        except EndEpisode as end:
            if end.reason == "context" and not turns:
                raise PromptTooLong(
                    f"{context.spec.uid}: the opening of {context.spec.task.item_id} leaves no "
                    "room for a turn; raise max_total_tokens, or lower max_observation_tokens"
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
            observation = player.observe(observation)
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
