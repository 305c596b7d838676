"""A reward for repeating the actions of a reference episode in their order.

The reference is the dataset's ground truth: a list of actions or a conversation (with from/value or
role/content keys), possibly as JSON text. The actions of a conversation follow "Action:" or are in
act, action or response tags.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from manus_jax.rewards.blocks import tagged_blocks
from manus_jax.rewards.registry import REWARDS, EpisodeTurn

ACTION_TAGS = ("act", "action", "response")


def normalized(action: str) -> str:
    """Lower-cases, collapses whitespace and removes trailing full stops."""
    return " ".join(action.lower().split()).rstrip(".").rstrip()


def actions_in(text: str) -> list[str]:
    """The actions in an agent's text, in tags or after "Action:"."""
    tagged = [block.content for block in tagged_blocks(text, ACTION_TAGS)]
    if tagged:
        return tagged
    _, marker, after = text.rpartition("Action:")
    first_line = after.strip().partition("\n")[0].strip()
    return [first_line] if marker and first_line else []


def reference_actions(ground_truth: Any) -> list[str]:
    """The actions of the reference; empty if there is no ground truth."""
    if isinstance(ground_truth, str):
        try:
            listed = json.loads(ground_truth)
        except ValueError:
            listed = None
        if not isinstance(listed, list):
            return actions_in(ground_truth)
        ground_truth = listed
    if ground_truth is None:
        return []
    if not isinstance(ground_truth, Sequence) or isinstance(ground_truth, str):
        raise ValueError(
            "the ground truth must be a list of actions or a conversation, got "
            f"{type(ground_truth).__name__}"
        )
    actions: list[str] = []
    for entry in ground_truth:
        if isinstance(entry, str):
            actions.append(entry)
        elif isinstance(entry, Mapping):
            if entry.get("from", entry.get("role")) in ("gpt", "assistant"):
                actions += actions_in(str(entry.get("value", entry.get("content", ""))))
        else:
            raise ValueError(f"the ground truth contains {type(entry).__name__}, not actions")
    return actions


@REWARDS.register("action_similarity")
def action_similarity(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn] = (),
    maximum: float = 1.0,
    minimum: float = 0.0,
    **facts: Any,
) -> float:
    """The fraction of the reference's actions that the agent took, in their order.

    Other actions in between are ignored. Scaled to `minimum`..`maximum`; the middle of the range if
    there is no reference.
    """
    wanted = [normalized(action) for action in reference_actions(ground_truth)]
    if not wanted:
        return (maximum + minimum) / 2
    done = [turn.action for turn in turns if turn.action is not None] or actions_in(solution_str)
    matched = 0
    for action in map(normalized, done):
        if matched < len(wanted) and action == wanted[matched]:
            matched += 1
    return minimum + (maximum - minimum) * matched / len(wanted)
