"""The pool of ScienceWorld simulators, each a Java virtual machine of some 460 MB.

The one idea: sessions come and go, virtual machines stay. A session leases one for its life and gives
it back warm; at the limit a lease is refused at once, in words, instead of filling the memory.
"""

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable
from typing import Any

from envs.game import GameError

SETTING = "SCIWORLD_SIMULATORS"
"""The environment variable that bounds the simulators of one server."""
DEFAULT_SIMULATORS = 4


class SimulatorPool:
    """At most `limit` simulators, made by `launch` when no idle one is left."""

    def __init__(self, limit: int, launch: Callable[[], Any]) -> None:
        self._limit = limit
        self._launch = launch
        self._idle: list[Any] = []
        self._alive = 0
        self._lock = threading.Lock()

    def lease(self) -> Any:
        """A simulator that is nobody else's until it is given back or discarded."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._alive >= self._limit:
                raise GameError(
                    f"All {self._limit} simulators are in use: close a session,"
                    f" or set {SETTING} to a higher number (some 460 MB each)."
                )
            self._alive += 1
        try:
            return self._launch()
        except BaseException:
            with self._lock:
                self._alive -= 1
            raise

    def give_back(self, simulator: Any) -> None:
        with self._lock:
            self._idle.append(simulator)

    def discard(self, simulator: Any) -> None:
        """For one that no longer answers: another may be launched in its place."""
        with self._lock:
            self._alive -= 1
        simulator.close()


def launch() -> Any:
    """A new simulator. Its Java process ends with this one."""
    from scienceworld import ScienceWorldEnv

    return ScienceWorldEnv()


def limit() -> int:
    """The bound on simulators, from the environment."""
    text = os.environ.get(SETTING, str(DEFAULT_SIMULATORS))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{SETTING} must be a whole number of at least 1, not {text!r}")
    return int(text)


def missing() -> str | None:
    """What has to be installed, in one line, or None."""
    if importlib.util.find_spec("scienceworld") is None:
        return 'sciworld needs the extra "sciworld": pip install "manus-jax[sciworld]"'
    if shutil.which("java") is None:
        return 'sciworld needs Java (8 or newer) on the PATH, besides the extra "sciworld"'
    return None


POOL = SimulatorPool(limit(), launch)
