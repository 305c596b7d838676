"""Rewards for the length of the agent's text."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from manus_jax.rewards.blocks import tagged_blocks
from manus_jax.rewards.registry import REWARDS, EpisodeTurn


@REWARDS.register("length")
def thought_length(
    solution_str: str,
    ground_truth: Any,
    *,
    target: int = 50,
    tolerance: float = 0.3,
    maximum: float = 0.5,
    minimum: float = -0.25,
    tag: str | None = "think",
    **facts: Any,
) -> float:
    """The maximum for about `target` words inside `tag` blocks, less for more or fewer words.

    Deviations within `tolerance` (a fraction of the target) are free. Zero words, or twice the
    upper bound, lose half of the span between maximum and minimum. No block scores the minimum.
    With `tag` None, all words are counted.
    """
    if target < 1 or not 0 <= tolerance < 1:
        raise ValueError(
            f"target must be at least 1 and tolerance in [0, 1), got {target} and {tolerance}"
        )
    if tag is None:
        thoughts = [solution_str]
    else:
        thoughts = [block.content for block in tagged_blocks(solution_str, [tag])]
    if not thoughts:
        return minimum
    words = sum(len(thought.split()) for thought in thoughts)
    lower, upper = target * (1 - tolerance), target * (1 + tolerance)
    if words < lower:
        missed = 1 - words / lower
    elif words > upper:
        missed = min(1.0, (words - upper) / upper)
    else:
        return maximum
    return max(minimum, maximum - (maximum - minimum) * 0.5 * missed)


@REWARDS.register("length_penalty")
def length_penalty(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn],
    max_length: int = 450,
    min_length: int = 20,
    shape: Literal["linear", "quadratic", "log"] = "linear",
    scale: float = 0.01,
    **facts: Any,
) -> float:
    """-`scale` times the excess d, the characters by which the last turn is too long or too short.

    `shape` selects d ("linear"), d² ("quadratic") or log(1 + d) ("log").
    """
    size = len(turns[-1].text if turns else solution_str)
    outside = float(max(0, size - max_length, min_length - size))
    shapes = {"linear": outside, "quadratic": outside**2, "log": math.log1p(outside)}
    if shape not in shapes:
        raise ValueError(f"unknown shape {shape!r} (known: {', '.join(shapes)})")
    return -scale * shapes[shape]
