"""The number of episodes in flight in a run: what `Concurrency` decides, from what it sees here.

With `rollout.min_in_flight`, the number moves between it and `rollout.max_in_flight`; a
synchronous run changes it between two calls for episodes, an asynchronous one at once. Without it,
the number is always `rollout.max_in_flight`.
"""

import collections
import threading

import numpy as np

from manus_jax.agentgym.failures import FailureKind
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.protocol import Engine
from manus_jax.rollout.concurrency import LOWERING, Concurrency, Window
from manus_jax.rollout.trajectory import FailedEpisode, Outcome

_OVERLOAD = {*FailureKind, "engine", "overdue"} - {FailureKind.ITEM}


class EpisodeLimit:
    """Thread-safe."""

    def __init__(self, settings: RolloutSettings, engine: Engine) -> None:
        most = settings.max_in_flight
        self._adapts = settings.min_in_flight is not None
        self._engine = engine
        self._lock = threading.Lock()
        self._state = Concurrency.between(settings.min_in_flight or most, most)
        self._decisions: collections.Counter[str] = collections.Counter()
        self._begin_window()

    @property
    def count(self) -> int:
        return self._state.limit

    def after(self, outcome: Outcome, in_flight: int) -> bool:
        """Takes the outcome of an episode, one of `in_flight`; True if `count` has changed."""
        if not self._adapts:
            return False
        gauges = self._engine.metrics()
        with self._lock:
            self._in_flight.append(in_flight)
            self._queued.append(gauges.get("queue_length", 0.0))
            self._kv_usage.append(gauges.get("kv_usage", 0.0))
            if isinstance(outcome, FailedEpisode):
                self._failed += outcome.kind in _OVERLOAD
            else:
                self._seconds += [t.environment_seconds for t in outcome.own_turns if t.valid]
            if len(self._queued) < self._state.window:
                return False
            before = self._state.limit
            self._state = self._state.decide(
                Window(
                    episodes=len(self._queued),
                    failed=self._failed,
                    in_flight=float(np.mean(self._in_flight)),
                    queued=float(np.mean(self._queued)),
                    kv_usage=float(np.mean(self._kv_usage)),
                    environment_seconds=float(np.median(self._seconds)) if self._seconds else 0.0,
                )
            )
            self._decisions[self._state.decision] += 1
            self._begin_window()
            return self._state.limit != before

    def metrics(self) -> dict[str, float]:
        """The number, and the decisions since the last call; empty if it does not change."""
        if not self._adapts:
            return {}
        with self._lock:
            decisions, self._decisions = self._decisions, collections.Counter()
            return {
                "concurrency/limit": float(self._state.limit),
                "concurrency/raised": float(decisions["raise"]),
                **{f"concurrency/lowered_for/{why}": float(decisions[why]) for why in LOWERING},
            }

    def _begin_window(self) -> None:
        self._failed = 0
        self._in_flight: list[int] = []
        self._queued: list[float] = []
        self._kv_usage: list[float] = []
        self._seconds: list[float] = []
