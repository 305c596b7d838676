"""Rewards that compare the agent's answer with reference answers: exact match, F1, BLEU.

The answer is the last `<answer>…</answer>` block in the agent's own text, or its whole last turn if
`tag` is None. The reference answers are the dataset's ground truth: a string, a number, a list of
them, or a mapping with one of these under "target". The best match counts.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manus_jax.rewards.blocks import tagged_blocks
from manus_jax.rewards.registry import REWARDS, EpisodeTurn

_ARTICLES = re.compile(r"\b(a|an|the)\b")
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
