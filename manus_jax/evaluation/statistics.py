"""What a few tasks, each played a few times, say about all tasks: estimates with 95% intervals.

The one idea: the task is the unit. Episodes of one task are alike, so each task first becomes one
number (its mean over its samples, or its pass@k), and intervals count tasks, not episodes. Pure
arithmetic on plain numbers.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

Z = NormalDist().inv_cdf(0.975)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over `tasks` tasks, and its 95% interval (None where one task cannot give any)."""

    value: float
    low: float | None
    high: float | None
    tasks: int


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The chance that one of `k` of these samples, drawn without return, is a success.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) of what k fresh samples would do.
    """
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {successes} successes")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def ks_up_to(samples: int) -> list[int]:
    """The k for which pass@k is told: 1, 2, 4 and so on, and `samples` itself."""
    powers = [1 << power for power in range(samples.bit_length()) if 1 << power < samples]
    return [*powers, samples]


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Wilson's 95% interval for a share `mean` of `n` trials; it never leaves 0..1."""
    weight = Z * Z / n
    middle = (mean + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(mean * (1 - mean) / n + weight / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def share(per_task: Sequence[float]) -> Estimate | None:
    """The mean of tasks' shares in 0..1 (success rate, pass@k), with Wilson's interval.

    With one sample per task it is the textbook interval. With more it is no narrower than it has to
    be: shares with mean p never vary more than verdicts of 0 and 1 with mean p. None of no tasks.
    """
    if not per_task:
        return None
    mean = fmean(per_task)
    return Estimate(mean, *wilson(mean, len(per_task)), len(per_task))


def average(per_task: Sequence[float]) -> Estimate | None:
    """The mean of tasks' numbers on any scale (score), with the normal interval of the mean."""
    if not per_task:
        return None
    mean = fmean(per_task)
    if len(per_task) == 1:
        return Estimate(mean, None, None, 1)
    half = Z * stdev(per_task) / math.sqrt(len(per_task))
    return Estimate(mean, mean - half, mean + half, len(per_task))
