"""A user's agent as the episode.

    rollout.strategy = "program"
    rollout.strategy_parameters = {"function": "my_agent:play"}

The program is a Python function or a command. It calls the model through OpenAI's chat API and
optionally the environment; its requests are recorded as exact tokens (`rollout.endpoint`). An
attempt whose program fails is tried again; one whose program misuses the endpoint, or that has no
reward, is dropped and not scored.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from manus_jax.agentgym.rewards import full_reward
from manus_jax.engines.cancellation import Cancelled, EpisodeCancellation, Overdue
from manus_jax.rollout.endpoint.environment import EnvironmentPlay
from manus_jax.rollout.endpoint.episode import EndpointEpisode
from manus_jax.rollout.endpoint.programs import (
    ProgramTask,
    check_command,
    load_function,
    reward_of,
    running_command,
    running_function,
)
from manus_jax.rollout.episode import AttemptFailed, PromptTooLong
from manus_jax.rollout.strategies.registry import STRATEGIES, RolloutContext, declares
from manus_jax.rollout.trajectory import EndReason, EpisodeSpec, Outcome, Trajectory
from manus_jax.status import STATUS

if TYPE_CHECKING:  # it loads a web server
    from manus_jax.rollout.endpoint.server import Endpoint

RewardSource = Literal["environment", "result", "function"]


def _check(function: str | None, command: Sequence[str] | None, reward: RewardSource) -> None:
    if (function is None) == (command is None):
        raise ValueError("give either function = 'module:name' or command = ['program', ...]")
    if function is not None:
        load_function(function)
    if command is not None:
        check_command(command)


@STRATEGIES.register("program")
@declares(check=_check)
def program(
    spec: EpisodeSpec,
    rollout: RolloutContext,
    *,
    function: str | None = None,
    command: Sequence[str] | None = None,
    reward: RewardSource = "environment",
) -> Outcome:
    """Runs the program as the episode.

    `reward`: the environment gives it, the program returns or prints it ("result"), or the run's
    reward function alone does ("function"). Policies without an endpoint, such as the oracle, play
    a plain episode.
    """
    open_endpoint = getattr(rollout.agent, "endpoint", None)
    if open_endpoint is None:
        return rollout.play(spec)
    endpoint: Endpoint = open_endpoint()

    def play(cancellation: EpisodeCancellation, attempt: int) -> Trajectory:
        return _Attempt(spec, rollout, endpoint, reward, attempt).run(
            function, command, cancellation
        )

    return rollout.with_retries(spec, play)


class _Attempt:
    """One run of the program."""

    def __init__(
        self,
        spec: EpisodeSpec,
        rollout: RolloutContext,
        endpoint: "Endpoint",
        reward: RewardSource,
        attempt: int,
    ) -> None:
        self._spec, self._rollout, self._endpoint = spec, rollout, endpoint
        self._reward, self._attempt = reward, attempt

    def run(
        self,
        function: str | None,
        command: Sequence[str] | None,
        cancellation: EpisodeCancellation,
    ) -> Trajectory:
        task, settings = self._spec.task, self._rollout.settings
        assert task.env is not None and task.item is not None
        with ExitStack() as stack:
            session = stack.enter_context(self._rollout.pool.lease(task.env, cancellation.begin))
            game = EnvironmentPlay(session, task.item)
            stack.callback(game.end)
            episode = self._endpoint.open(self._spec.uid, self._attempt, settings, game.call)
            stack.callback(self._endpoint.end, episode)
            game.recording = episode.recording
            given = ProgramTask(
                base_url=self._endpoint.base_url(episode),
                api_key=episode.key,
                environment_url=self._endpoint.environment_url(episode),
                env=task.env,
                item=task.item,
                item_id=task.item_id,
                prompt=tuple({"role": m.role, "content": m.content} for m in task.prompt),
                ground_truth=task.ground_truth,
                extra=task.extra,
                environment=game,
            )
            if function is not None:
                started = running_function(load_function(function), given)
            else:
                assert command is not None
                started = running_command(command, given)
            result, error = None, None
            with started as ended, STATUS.working("waiting for a program"):
                try:
                    result = cancellation.result(ended, math.inf)
                except (Cancelled, Overdue):
                    raise
                except BaseException as raised:  # of a user's code
                    error = raised
            self._endpoint.end(episode)
            game.end()
            self._check(episode, game, error)
            return self._trajectory(episode, game, result, session.episode_reward, session.success)

    def _check(
        self, episode: EndpointEpisode, game: EnvironmentPlay, error: BaseException | None
    ) -> None:
        """Raises for an attempt that must not be used."""
        if episode.engine_error is not None:  # even if the program goes on without the reply
            raise episode.engine_error
        if game.failure is not None:
            raise game.failure
        if episode.misuse is not None:
            raise self._failed(episode.misuse)
        silent = not len(episode.recording)
        if silent and episode.limit == "context":
            raise PromptTooLong(
                f"the first request of the program of episode {self._spec.uid} does not fit: "
                f"{episode.refusal}; raise rollout.max_total_tokens"
            )
        if error is not None and (episode.limit is None or self._reward == "result"):
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise self._failed(f"it failed: {reason}", retryable=True)
        if silent:
            cause = "it must call the endpoint"
            if episode.refusal is not None:
                cause = f"its newest request was refused: {episode.refusal}"
            raise self._failed(f"it ended without a reply of the model; {cause}")

    def _trajectory(
        self,
        episode: EndpointEpisode,
        game: EnvironmentPlay,
        result: Any,
        env_reward: float,
        success: bool,
    ) -> Trajectory:
        end_reason: EndReason = "done" if game.done else "gave_up"
        if self._reward == "result":
            number = reward_of(result)
            if number is None or not math.isfinite(number):
                raise self._failed(
                    f"it returned no reward but {str(result)[-80:]!r}; a number is expected"
                )
            env_reward, success, end_reason = number, full_reward(number), "done"
        elif self._reward == "environment" and game.first_observation is None:
            raise self._failed(
                "it returned no reward: it did not play the environment, and reward = 'environment'"
            )
        recording = episode.recording
        turns, segments = recording.trajectory(env_reward)
        opening = recording.replies[0].prompt.messages
        return Trajectory(
            spec=self._spec,
            opening=opening,
            first_observation=game.first_observation or opening[-1].content,
            turns=turns,
            segments=segments,
            env_reward=env_reward,
            success=success,
            end_reason=episode.limit or end_reason,
            attempts=self._attempt,
            prompts_extended=recording.prompts_extended,
            prompts_forked=recording.prompts_forked,
        )

    def _failed(self, what: str, retryable: bool = False) -> AttemptFailed:
        return AttemptFailed(
            "program", f"the program of episode {self._spec.uid}: {what}", retryable
        )
