"""What an environment's number means, and how it becomes rewards that add up.

Servers disagree: sciworld sends the score so far, the tool environments their best progress, maze a
verdict at the end. The one idea: every meaning is a rule for the episode's total after a step; a
step's reward is the growth of that total, so the steps of an episode always sum to its reward.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass


class Meaning(enum.Enum):
    """How the number of one step relates to the reward of the episode."""

    FINAL = "final"  # a verdict: counts at the step that ends the episode, is 0 until then
    CUMULATIVE = "cumulative"  # the episode's reward so far; it may fall
    BEST = "best"  # the best progress so far; it never falls


def full_marks(total: float) -> bool:
    """Success is the whole reward (within rounding of fractions such as 3 times 1/3)."""
    return total >= 1.0 - 1e-6


def any_reward(total: float) -> bool:
    """Success is any reward at all: the number only says how fast the goal was reached."""
    return total > 0.0


@dataclass(frozen=True)
class RewardRule:
    """Reads one environment's number: where it is, its range, what it means, what is success.

    Values are divided by `high`, so that 1 is always the best there is. A value outside
    `low..high` is an error, as the scale would be wrong, unless `clip` says that some are known.
    """

    meaning: Meaning
    field: str = "reward"
    low: float = 0.0
    high: float = 1.0
    clip: bool = False
    success: Callable[[float], bool] = full_marks

    def scaled(self, value: float) -> float:
        """The server's value on the scale whose best is 1; ValueError outside the range."""
        if not math.isfinite(value):
            raise ValueError(f"{self.field} is {value}")
        if self.clip:
            value = min(max(value, self.low), self.high)
        elif not self.low <= value <= self.high:
            raise ValueError(f"{self.field} {value:g} is outside {self.low:g}..{self.high:g}")
        return value / self.high

    def total_after(self, total: float, value: float, done: bool) -> float:
        """The episode's reward after a step that answered `value` (scaled)."""
        match self.meaning:
            case Meaning.FINAL:
                return value if done else total
            case Meaning.CUMULATIVE:
                return value
            case Meaning.BEST:
                return max(total, value)


@dataclass
class EpisodeReward:
    """The reward of one episode as it grows.

    A turn that never reaches the server (an action that does not parse) is not recorded and so
    leaves the total at the value of the last valid step.
    """

    rule: RewardRule
    total: float = 0.0

    def record(self, value: float, done: bool) -> float:
        """Takes in one answered step and returns its reward, the growth of the total."""
        before = self.total
        self.total = self.rule.total_after(before, self.rule.scaled(value), done)
        return self.total - before

    @property
    def success(self) -> bool:
        return self.rule.success(self.total)
