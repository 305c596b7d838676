"""Rewards for the agent's text: its format, valid actions, a pattern, its length."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from manus_jax.rewards.registry import REWARDS, EpisodeTurn, Score, try_early

TAGS = ("think", "memory", "plan", "act")
FULL_ORDER = ("think", "memory", "plan", "think", "act")
SIMPLE_ORDER = ("think", "act")


class Block(NamedTuple):
    tag: str
    content: str


def tagged_blocks(text: str, tags: Iterable[str]) -> list[Block]:
    """The closed blocks `<tag>…</tag>` in order, in linear time.

    A tag inside another block is part of that block's content.
    """
    pattern = re.compile(rf"<(/?)({'|'.join(map(re.escape, sorted(set(tags))))})>")
    found: list[Block] = []
    opened: re.Match[str] | None = None
    for mark in pattern.finditer(text):
        if not mark[1] and opened is None:
            opened = mark
        elif mark[1] and opened is not None and mark[2] == opened[2]:
            found.append(Block(mark[2], text[opened.end() : mark.start()].strip()))
            opened = None
    return found


def _in_order(wanted: Sequence[str], found: Sequence[str]) -> bool:
    """Whether `wanted` is a subsequence of `found`."""
    rest = iter(found)
    return all(tag in rest for tag in wanted)


@REWARDS.register("format")
@try_early
def tag_format(
    solution_str: str,
    ground_truth: Any,
    *,
    mode: Literal["full", "simple"] = "full",
    maximum: float = 1.0,
    minimum: float = -0.5,
    **facts: Any,
) -> float:
    """How much of the format think, memory, plan, think, act the text has.

    In "full" mode, all tags in this order score the maximum, all four tags in any order
    (maximum + minimum) / 1.5, and think and act (maximum + minimum) / 2. In "simple" mode, think
    before act scores the maximum. Anything else scores the minimum.
    """
    if mode not in ("full", "simple"):
        raise ValueError(f"unknown mode {mode!r} (known: full, simple)")
    found = [block.tag for block in tagged_blocks(solution_str, TAGS)]
    if mode == "simple":
        return maximum if _in_order(SIMPLE_ORDER, found) else minimum
    if _in_order(FULL_ORDER, found):
        return maximum
    if set(TAGS) <= set(found):
        return (maximum + minimum) / 1.5
    if set(SIMPLE_ORDER) <= set(found):
        return (maximum + minimum) / 2
    return minimum


@REWARDS.register("valid_actions")
@try_early
def valid_actions(
    solution_str: str, ground_truth: Any, *, turns: Sequence[EpisodeTurn], **facts: Any
) -> Score:
    """The fraction of turns with a valid action, allocated per turn; 0 without turns."""
    shares = tuple(float(turn.valid) / len(turns) for turn in turns)
    return Score(sum(shares), {}, shares)


@REWARDS.register("pattern")
@try_early
def pattern(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn],
    pattern: str,
    **facts: Any,
) -> float:
    """1 if the regular expression `pattern` matches in the agent's last turn, else 0."""
    last = turns[-1].text if turns else solution_str
    return float(re.search(pattern, last, re.DOTALL) is not None)


@REWARDS.register("length")
@try_early
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
@try_early
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
