"""Converts the values that a server sends to step rewards.

Servers report different quantities: sciworld sends the score so far, the tool environments send
their progress, and maze sends a result at the end. A `RewardRule` computes the episode's total
reward after each step; the reward of a step is the change of that total, so step rewards always sum
to the episode reward.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass


class RewardKind(enum.Enum):
    """How the value sent with a step relates to the episode reward."""

    FINAL = "final"  # counts only at the step that ends the episode
    CUMULATIVE = "cumulative"  # the episode reward so far; it can fall
    MAX_SO_FAR = "max_so_far"  # the episode reward is the highest value seen


def full_reward(total: float) -> bool:
    """Success means the full reward, up to rounding of fractions such as 3 times 1/3."""
    return total >= 1.0 - 1e-6


def any_reward(total: float) -> bool:
    """Success means any reward at all: the value only measures how fast the goal was reached."""
    return total > 0.0


@dataclass(frozen=True)
class RewardRule:
    """How to read one environment's value: its kind, field and range, and the success criterion.

    Values are divided by `high`, so that 1 is always the best possible reward. A value outside
    `low..high` is an error, because the scale would be wrong, unless `clip` is set.
    """

    kind: RewardKind
    field: str = "reward"
    low: float = 0.0
    high: float = 1.0
    clip: bool = False
    success: Callable[[float], bool] = full_reward

    def scaled(self, value: float) -> float:
        """The server's value divided by `high`; ValueError if it is out of range."""
        if not math.isfinite(value):
            raise ValueError(f"{self.field} is {value}")
        if self.clip:
            value = min(max(value, self.low), self.high)
        elif not self.low <= value <= self.high:
            raise ValueError(f"{self.field} {value:g} is outside {self.low:g}..{self.high:g}")
        return value / self.high

    def total_after(self, total: float, value: float, done: bool) -> float:
        """The episode reward after a step with the scaled value `value`."""
        match self.kind:
            case RewardKind.FINAL:
                return value if done else total
            case RewardKind.CUMULATIVE:
                return value
            case RewardKind.MAX_SO_FAR:
                return max(total, value)


@dataclass
class EpisodeReward:
    """The running reward of one episode.

    A turn that never reaches the server (an action that does not parse) is not recorded, so the
    total stays as it was.
    """

    rule: RewardRule
    total: float = 0.0

    def record(self, value: float, done: bool) -> float:
        """Records the value of one step and returns the step's reward."""
        before = self.total
        self.total = self.rule.total_after(before, self.rule.scaled(value), done)
        return self.total - before

    @property
    def success(self) -> bool:
        return self.rule.success(self.total)
