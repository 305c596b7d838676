"""The environment of a program's episode: what it plays is recorded with its turns."""

import threading
import time
from typing import Any

from manus_jax.agentgym.client import Session, StepResult
from manus_jax.agentgym.failures import EnvironmentFailure
from manus_jax.rollout.endpoint.openai_api import ApiError
from manus_jax.rollout.endpoint.recording import Recording


class EpisodeEnded(RuntimeError):
    """A program plays although its episode, or its game, has ended."""


class EnvironmentPlay:
    """One game, for the program of one episode. Thread-safe."""

    def __init__(self, session: Session, item: int) -> None:
        self._session, self._item = session, item
        self._lock = threading.Lock()
        self._ended = False
        self.recording: Recording | None = None  # of the episode, once it is open
        self.first_observation: str | None = None
        self.done = False
        self.failure: EnvironmentFailure | None = None

    def reset(self) -> str:
        with self._lock:
            self._check()
            if self.first_observation is not None:
                raise EpisodeEnded("an episode plays its task once; reset was called before")
            try:
                self.first_observation = self._session.reset(self._item)
            except EnvironmentFailure as failure:
                self.failure = failure
                raise
            return self.first_observation

    def step(self, action: str, is_action: bool = True) -> StepResult:
        """Plays an action. One that is not the agent's is recorded by its reward only."""
        with self._lock:
            self._check()
            if self.first_observation is None:
                raise EpisodeEnded("call reset before the first step")
            if self.done:
                raise EpisodeEnded("the game has ended")
            began = time.perf_counter()
            try:
                result = self._session.step(action)
            except EnvironmentFailure as failure:
                self.failure = failure
                raise
            self.done = result.done
            if self.recording is not None:
                rejected = result.observation.startswith(self._session.row.rejections)
                seconds = time.perf_counter() - began
                shown = (action, result.observation) if is_action else None
                self.recording.step(shown, result.reward, rejected, seconds)
            return result

    def call(self, name: str, body: Any) -> dict[str, Any]:
        """A call over HTTP: reset with {}, or step with {"action": ...}."""
        try:
            if name == "reset":
                return {"observation": self.reset()}
            action = body.get("action") if isinstance(body, dict) else None
            if not isinstance(action, str):
                raise ApiError(400, "step needs the field 'action', a text")
            result = self.step(action)
        except EpisodeEnded as error:
            raise ApiError(409, str(error)) from None
        except EnvironmentFailure as failure:
            raise ApiError(502, str(failure)) from None
        return {"observation": result.observation, "reward": result.reward, "done": result.done}

    def end(self) -> None:
        """Refuses further calls; waits for one that is being played."""
        with self._lock:
            self._ended = True

    def _check(self) -> None:
        if self._ended:
            raise EpisodeEnded("the episode has ended")
