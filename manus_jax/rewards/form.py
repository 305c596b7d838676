"""Rewards for the format of the agent's text: tags, valid actions, a pattern."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from manus_jax.rewards.blocks import tagged_blocks
from manus_jax.rewards.registry import REWARDS, EpisodeTurn, Score

TAGS = ("think", "memory", "plan", "act")
FULL_ORDER = ("think", "memory", "plan", "think", "act")
SIMPLE_ORDER = ("think", "act")


def _in_order(wanted: Sequence[str], found: Sequence[str]) -> bool:
    """Whether `wanted` is a subsequence of `found`."""
    rest = iter(found)
    return all(tag in rest for tag in wanted)


@REWARDS.register("format")
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
def valid_actions(
    solution_str: str, ground_truth: Any, *, turns: Sequence[EpisodeTurn], **facts: Any
) -> Score:
    """The fraction of turns with a valid action, allocated per turn; 0 without turns."""
    shares = tuple(float(turn.valid) / len(turns) for turn in turns)
    return Score(sum(shares), {}, shares)


@REWARDS.register("pattern")
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
