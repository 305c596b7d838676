"""One episode: lease an environment, play it turn by turn, and come back with what happened.

The one idea: an episode ends in a `Trajectory`, which may be trained on, or a `FailedEpisode`,
which may not. What the agent does badly (no action, a wrong one, too many tokens) belongs to the
first; what infrastructure does badly is tried again from the start on a fresh environment, and in
the end is the second. Nothing in between becomes a reward of zero.
"""

import logging
import random
import time

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.failures import EnvironmentFailure
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import Cancellation, Cancelled
from manus_jax.engines.protocol import EngineError
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.player import Agent, NoAnswer, Part, Player
from manus_jax.rollout.prompts import cut_middle, opening
from manus_jax.rollout.trajectory import (
    EndReason,
    EpisodeSpec,
    FailedEpisode,
    Outcome,
    Trajectory,
    Turn,
)

_log = logging.getLogger(__name__)


class PromptTooLong(Exception):
    """The opening leaves the model no room for a turn."""


def play_episode(
    spec: EpisodeSpec,
    agent: Agent,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    cancellation: Cancellation | None = None,
) -> Outcome:
    """Plays an episode, up to `pool.settings.attempts` times where infrastructure fails."""
    cancellation = cancellation or Cancellation()
    attempt = 1
    while True:
        try:
            return _attempt(spec, agent, pool, settings, cancellation, attempt)
        except EnvironmentFailure as failure:
            kind, error, retryable = str(failure.kind), str(failure), failure.retryable
        except EngineError as failure:
            kind, error, retryable = "engine", str(failure), True
        except PromptTooLong as failure:
            kind, error, retryable = "prompt_too_long", str(failure), False
        except Cancelled:
            return FailedEpisode(spec, "cancelled", "the run was cancelled", attempt)
        if not retryable or attempt >= pool.settings.attempts:
            _log.warning("episode %s is dropped (%s): %s", spec.uid, kind, error)
            return FailedEpisode(spec, kind, error, attempt)
        try:
            cancellation.sleep(pool.settings.retry.seconds(attempt, random.random()))
        except Cancelled:
            return FailedEpisode(spec, "cancelled", "the run was cancelled", attempt)
        attempt += 1


def _attempt(
    spec: EpisodeSpec,
    agent: Agent,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    cancellation: Cancellation,
    attempt: int,
) -> Trajectory:
    task = spec.task
    assert task.env is not None
    action_format = format_for(environment(task.env), settings.action_format)
    beginning = opening(task, action_format, settings)
    part = Part(spec, beginning, action_format, settings, cancellation, attempt)
    cancellation.check()
    with pool.lease(task.env) as session:
        player = agent.player(part)
        try:
            return _play(part, session, player)
        finally:
            player.close()


def _play(part: Part, session: Session, player: Player) -> Trajectory:
    settings, item = part.settings, part.spec.task.item
    assert item is not None
    turns: list[Turn] = []
    end_reason: EndReason = "max_turns"
    seen = session.reset(item)
    first_observation = player.hear(cut_middle(seen, settings.max_observation_chars))
    while len(turns) < settings.max_turns and end_reason != "done":
        part.cancellation.check()
        began = time.perf_counter()
        try:
            answer = player.answer(len(turns))
        except NoAnswer as silence:
            if silence.reason == "context" and not turns:
                raise PromptTooLong(
                    f"{part.spec.uid}: the opening of {part.spec.task.item_id} leaves no room for "
                    "a turn; raise max_total_tokens, or lower max_observation_tokens"
                ) from None
            end_reason = silence.reason
            break
        answered = time.perf_counter()
        parsed = part.action_format.parse(answer.text, session.row.action)
        if parsed.action is None:
            observation, reward, penalty = parsed.error, 0.0, -settings.invalid_action_penalty
        else:
            result = session.step(parsed.action)
            observation, reward, penalty = result.observation, result.reward, 0.0
            if result.done:
                end_reason = "done"
        stepped = time.perf_counter()
        observation = cut_middle(observation, settings.max_observation_chars)
        if end_reason != "done" and len(turns) + 1 < settings.max_turns:
            observation = player.hear(observation)
        turns.append(
            Turn(
                text=answer.text,
                action=parsed.action,
                observation=observation,
                reward=reward,
                penalty=penalty,
                cut=answer.cut,
                segment=answer.segment,
                start=answer.start,
                stop=answer.stop,
                generation_seconds=answered - began,
                environment_seconds=stepped - answered,
            )
        )
    return Trajectory(
        spec=part.spec,
        opening=part.opening.messages(first_observation),
        first_observation=first_observation,
        turns=tuple(turns),
        segments=player.segments(),
        env_reward=session.episode_reward,
        success=session.success,
        end_reason=end_reason,
        attempts=part.attempt,
        prompts_extended=player.prompts_extended,
        prompts_forked=player.prompts_forked,
    )
