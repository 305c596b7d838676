"""Adaptive concurrency: how many episodes are in flight, between two limits.

The number doubles until the first sign of pressure, then grows slowly while there is none and
shrinks while there is some: requests wait in the engine, its KV cache is full, environments answer
more slowly than they did, or episodes fail because a server is overloaded.

The controller is a value without I/O, clock or threads. It decides after a window of episodes,
which its caller measures, and every decision returns the next state.
"""

import dataclasses
import math
from typing import Literal

Decision = Literal["start", "hold", "raise", "engine", "environments", "failures"]
"""The last three lower the number, for this reason."""
LOWERING: tuple[Decision, ...] = ("engine", "environments", "failures")

_GROWTH, _SHRINKAGE, _BACK_OFF = 1.15, 0.85, 0.5
_QUEUED, _IDLE = 0.25, 0.05  # of the episodes in flight: requests that wait in the engine
_FULL, _ROOMY = 0.95, 0.8  # of the KV cache
_REACHED = 0.8  # of the limit: if there are fewer episodes anyway, a higher one has no effect
_SLOWER = 2.5  # times the fastest window
_FORGET = 1.02  # per window: so that the baseline adapts to an environment that stays slower
_FAILING = 0.3  # of the episodes of a window


@dataclasses.dataclass(frozen=True)
class Window:
    """What has been seen since the last decision."""

    episodes: int
    failed: int  # because of a server; other failures do not depend on the load
    in_flight: float  # episodes, mean
    queued: float  # requests that wait in the engine, mean
    kv_usage: float  # share of the KV cache in use, mean
    environment_seconds: float  # median of a call; 0 if there was none


@dataclasses.dataclass(frozen=True)
class Concurrency:
    """The state: at most `limit` episodes are in flight, between `least` and `most`."""

    least: int
    most: int
    limit: int
    decision: Decision = "start"
    starting: bool = True  # no pressure so far
    fastest: float = math.inf  # seconds of an environment's call

    @classmethod
    def between(cls, least: int, most: int) -> "Concurrency":
        return cls(least, most, least)

    @property
    def window(self) -> int:
        """Episodes to wait for before the next decision, so that the last one has had an effect."""
        return max(8, self.limit // 2)

    def decide(self, seen: Window) -> "Concurrency":
        took = seen.environment_seconds
        fastest = min(self.fastest * _FORGET, took) if took > 0 else self.fastest
        decision: Decision = "hold"
        if seen.failed > _FAILING * max(1, seen.episodes):
            decision = "failures"
        elif seen.queued > _QUEUED * self.limit or seen.kv_usage > _FULL:
            decision = "engine"
        elif took > _SLOWER * fastest:
            decision = "environments"
        elif (
            seen.queued <= _IDLE * self.limit
            and seen.kv_usage <= _ROOMY
            and seen.in_flight >= _REACHED * self.limit
        ):
            decision = "raise"
        if decision == "raise":
            limit = math.ceil(self.limit * (2.0 if self.starting else _GROWTH))
        elif decision == "hold":
            limit = self.limit
        else:
            limit = int(self.limit * (_BACK_OFF if decision == "failures" else _SHRINKAGE))
        return dataclasses.replace(
            self,
            limit=min(self.most, max(self.least, limit)),
            decision=decision,
            starting=self.starting and decision not in LOWERING,
            fastest=fastest,
        )
