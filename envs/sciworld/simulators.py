"""The pool of ScienceWorld simulators, each a Java virtual machine of 200 to 500 MB.

Virtual machines outlive sessions: a session leases one and returns it warm. At the limit a lease
fails immediately instead of filling the memory. A used simulator plays exactly like a new one,
because the two kinds of state that it would carry over between items, identity hashes and cached
paths, are eliminated here.
"""

import importlib
import importlib.util
import logging
import os
import shutil
import threading
from collections.abc import Callable
from typing import Any

from envs.game import GameError

SETTING = "SCIWORLD_SIMULATORS"
"""The environment variable that limits the simulators of one server."""
DEFAULT_SIMULATORS = 4
MEMORY_OPTIONS = "-Xmx512m -XX:+UseSerialGC"
"""Without a heap limit, a simulator that plays many tasks grows to more than a gigabyte."""
SAME_HASHES = "-XX:+UnlockExperimentalVMOptions -XX:hashCode=2"
"""ScienceWorld keeps its objects in sets ordered by identity hash, a random number per object, and
iterates over these sets to list things, exchange heat and carry current. With the same hash for all
objects, iteration follows insertion order."""


class SimulatorPool:
    """At most `limit` simulators, created by `launch` when none is idle."""

    def __init__(self, limit: int, launch: Callable[[], Any]) -> None:
        self._limit = limit
        self._launch = launch
        self._idle: list[Any] = []
        self._alive = 0
        self._lock = threading.Lock()

    def lease(self) -> Any:
        """A simulator for exclusive use until it is returned or discarded."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._alive >= self._limit:
                raise GameError(
                    f"All {self._limit} simulators are in use: close a session,"
                    f" or set {SETTING} to a higher number (up to 500 MB each)."
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
        """Removes a simulator that no longer responds; another may be launched in its place."""
        with self._lock:
            self._alive -= 1
        simulator.close()


def launch() -> Any:
    """A new simulator. Its Java process ends with this process."""
    from scienceworld import ScienceWorldEnv

    os.environ["JAVA_TOOL_OPTIONS"] = java_options(os.environ.get("JAVA_TOOL_OPTIONS", ""))
    # py4j logs a traceback for every call to a dead process; callers raise a one-line error.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    simulator = ScienceWorldEnv()
    identity_hash = simulator._gateway.jvm.System.identityHashCode
    if identity_hash("one") != identity_hash("another"):
        simulator.close()
        raise GameError(
            f"This Java ignores {SAME_HASHES}, without which ScienceWorld does not play an item"
            " the same way twice: use OpenJDK, and set no other hashCode in JAVA_TOOL_OPTIONS."
        )
    return simulator


def java_options(given: str) -> str:
    """`given` (default: a memory limit) plus the options that make items reproducible."""
    options = given or MEMORY_OPTIONS
    return options if SAME_HASHES in options else f"{options} {SAME_HASHES}"


def gold_path(simulator: Any, task: str, variation: int) -> list[str]:
    """ScienceWorld's own solution of the item."""
    # It caches paths through the house by start room. A path search consumes random numbers, so a
    # cached path would change the rest of the solution.
    simulator._gateway.jvm.scienceworld.goldagent.PathFinder.precomputedExhaustivePaths().clear()
    simulator.load(task, variation, "", generateGoldPath=True)
    return list(simulator.get_gold_action_sequence())


def broken_connection() -> tuple[type[BaseException], ...]:
    """The exceptions raised when a simulator's Java process is gone."""
    # py4j comes with scienceworld and has no type stubs.
    return importlib.import_module("py4j.protocol").Py4JNetworkError, OSError


def limit() -> int:
    """The limit on simulators, from the environment; `missing` reports an invalid setting."""
    text = os.environ.get(SETTING, "")
    return int(text) if _is_count(text) else DEFAULT_SIMULATORS


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) >= 1


def missing() -> str | None:
    """What has to be installed or corrected, in one line, or None."""
    setting = os.environ.get(SETTING)
    if setting is not None and not _is_count(setting):
        return f"{SETTING} must be a whole number of at least 1, not {setting!r}"
    if importlib.util.find_spec("scienceworld") is None:
        return 'sciworld needs the extra "sciworld": pip install "manus-jax[sciworld]"'
    if shutil.which("java") is None:
        return 'sciworld needs Java (8 or newer) on the PATH, besides the extra "sciworld"'
    return None


POOL = SimulatorPool(limit(), launch)
