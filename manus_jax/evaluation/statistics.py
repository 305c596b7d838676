"""Estimates with 95% confidence intervals from a sample of tasks.

The unit of observation is the task, since episodes of one task are correlated: each task is first
reduced to one number (its mean over samples, or its pass@k), and intervals count tasks rather than
episodes.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

Z = NormalDist().inv_cdf(0.975)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over `tasks` tasks and its 95% interval (None if one task does not give any)."""

    value: float
    low: float | None
    high: float | None
    tasks: int


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The probability that at least one of `k` samples succeeds, from `samples` samples.

    The unbiased estimate is 1 - C(n - c, k) / C(n, k) with n samples and c successes.
    """
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {successes} successes")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def ks_up_to(samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two below `samples`, and `samples`."""
    powers = [1 << power for power in range(samples.bit_length()) if 1 << power < samples]
    return [*powers, samples]


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Wilson's 95% interval for a proportion `mean` of `n` trials; always within 0..1."""
    weight = Z * Z / n
    middle = (mean + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(mean * (1 - mean) / n + weight / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def share(per_task: Sequence[float]) -> Estimate | None:
    """The mean of per-task proportions (success rate, pass@k) with Wilson's interval.

    With one sample per task this is the standard interval; with more samples it is conservative,
    because proportions with mean p vary at most as much as 0/1 outcomes with mean p. None if there
    are no tasks.
    """
    if not per_task:
        return None
    mean = fmean(per_task)
    return Estimate(mean, *wilson(mean, len(per_task)), len(per_task))


def average(per_task: Sequence[float]) -> Estimate | None:
    """The mean of per-task values on any scale (score) with the normal interval."""
    if not per_task:
        return None
    mean = fmean(per_task)
    if len(per_task) == 1:
        return Estimate(mean, None, None, 1)
    half = Z * stdev(per_task) / math.sqrt(len(per_task))
    return Estimate(mean, mean - half, mean + half, len(per_task))
