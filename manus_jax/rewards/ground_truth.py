"""Rewards that compare the episode with the dataset's ground truth: answers and actions.

The answer of the agent is the last `<answer>…</answer>` block in its own text, or its whole last
turn if `tag` is None. Reference answers are a string, a number, a list of them, or a mapping with
one of these under "target"; the best match counts. Reference actions are a list of actions or a
conversation (with from/value or role/content keys), possibly as JSON text.
"""

import json
import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manus_jax.rewards.registry import REWARDS, EpisodeTurn, try_early
from manus_jax.rewards.text import tagged_blocks

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ACTION_TAGS = ("act", "action", "response")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> str:
    """Lower-cases, removes punctuation and articles, and collapses whitespace."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def references(ground_truth: Any) -> list[str]:
    """The reference answers as strings; ValueError if there are none."""
    if isinstance(ground_truth, Mapping):
        if "target" not in ground_truth:
            raise ValueError(f"the ground truth has no key 'target', only {list(ground_truth)}")
        ground_truth = ground_truth["target"]
    several = isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str)
    listed = list(ground_truth) if several else [ground_truth]
    if not listed or any(not isinstance(one, str | int | float) for one in listed):
        raise ValueError(f"the ground truth must be one or more answers, got {ground_truth!r}")
    return [str(one) for one in listed]


def given_answer(solution_str: str, turns: Sequence[EpisodeTurn], tag: str | None) -> str | None:
    """The agent's answer, or None."""
    if tag is None:
        return turns[-1].text if turns else solution_str
    blocks = tagged_blocks(solution_str, [tag])
    return blocks[-1].content if blocks else None


@REWARDS.register("exact_match")
@try_early
def exact_match(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn] = (),
    tag: str | None = "answer",
    substring: bool = False,
    format_score: float = 0.0,
    **facts: Any,
) -> float:
    """1 for a correct answer, `format_score` for a wrong one, 0 for none.

    Strings are normalized first. With `substring`, an answer that contains a reference is correct.
    """
    correct = [normalized(reference) for reference in references(ground_truth)]
    answer = given_answer(solution_str, turns, tag)
    if answer is None:
        return 0.0
    predicted = normalized(answer)
    matches = predicted in correct or (
        substring and any(one and one in predicted for one in correct)
    )
    return 1.0 if matches else format_score


@REWARDS.register("f1")
@try_early
def f1(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn] = (),
    tag: str | None = "answer",
    **facts: Any,
) -> float:
    """F1 of the normalized words of the answer and the best-matching reference."""
    correct = references(ground_truth)
    answer = given_answer(solution_str, turns, tag)
    return 0.0 if answer is None else max(_f1(normalized(answer), normalized(r)) for r in correct)


def _f1(predicted: str, correct: str) -> float:
    ours, theirs = predicted.split(), correct.split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


@REWARDS.register("bleu")
@try_early
def bleu(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn] = (),
    tag: str | None = "answer",
    max_order: int = 4,
    smooth: bool = True,
    **facts: Any,
) -> float:
    """BLEU of the answer against all references (lower case, words split at spaces).

    The geometric mean of the clipped n-gram precisions up to `max_order`, times the brevity penalty
    for the reference of the nearest length. `smooth` adds one to the counts of n-grams longer than
    one word (Lin and Och, 2004), because single sentences rarely share four words.
    """
    if max_order < 1:
        raise ValueError(f"max_order must be at least 1, got {max_order}")
    correct = [reference.lower().split() for reference in references(ground_truth)]
    answer = given_answer(solution_str, turns, tag)
    predicted = (answer or "").lower().split()
    if not predicted:
        return 0.0
    total = 0.0
    for order in range(1, max_order + 1):
        ours = _ngrams(predicted, order)
        best: Counter[tuple[str, ...]] = Counter()
        for words in correct:
            best |= _ngrams(words, order)
        added = 1 if smooth and order > 1 else 0
        matched, possible = (ours & best).total() + added, ours.total() + added
        if not matched:
            return 0.0
        total += math.log(matched / possible)
    nearest = min((len(words) for words in correct), key=lambda n: (abs(n - len(predicted)), n))
    brevity = min(0.0, 1 - nearest / len(predicted))
    return math.exp(brevity + total / max_order)


def _ngrams(words: Sequence[str], order: int) -> "Counter[tuple[str, ...]]":
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def normalized_action(action: str) -> str:
    """Lower-cases, collapses whitespace and removes trailing full stops."""
    return " ".join(action.lower().split()).rstrip(".").rstrip()


def actions_in(text: str) -> list[str]:
    """The actions in an agent's text, in tags or after "Action:"."""
    tagged = [block.content for block in tagged_blocks(text, _ACTION_TAGS)]
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
@try_early
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
    wanted = [normalized_action(action) for action in reference_actions(ground_truth)]
    if not wanted:
        return (maximum + minimum) / 2
    done = [turn.action for turn in turns if turn.action is not None] or actions_in(solution_str)
    matched = 0
    for action in map(normalized_action, done):
        if matched < len(wanted) and action == wanted[matched]:
            matched += 1
    return minimum + (maximum - minimum) * matched / len(wanted)
