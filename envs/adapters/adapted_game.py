"""What adapters have in common: the package that they need, and the state of a game."""

import importlib

from envs.game import GameError, Step
from envs.registry import UnknownEnvironment


def require_package(name: str, module: str, extra: str) -> None:
    """UnknownEnvironment, with how to install it, if the environment's package is missing."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UnknownEnvironment(
            f"{name} needs the package {module.partition('.')[0]} ({error}): "
            f"pip install 'manus-jax[{extra}]'"
        ) from None


class AdaptedGame:
    """A game whose reward is the sum of its steps' rewards so far."""

    def __init__(self) -> None:
        self._seen: str | None = None
        self._total, self._done = 0.0, False

    def observation(self) -> str:
        if self._seen is None:
            raise GameError("Reset before the first observation.")
        return self._seen

    def _started(self, observation: str) -> str:
        self._total, self._done, self._seen = 0.0, False, observation
        return observation

    def _require_running(self) -> None:
        if self._seen is None or self._done:
            raise GameError("Reset before the next step.")

    def _refused(self, reason: str) -> Step:
        """The answer to what is not an action."""
        self._seen = reason
        return Step(reason, self._total, False)

    def _stepped(self, observation: str, reward: float, done: bool) -> Step:
        self._seen, self._done = observation, done
        self._total += reward
        return Step(observation, self._total, done)
