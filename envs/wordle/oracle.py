"""Guesses the word that splits the remaining candidates most finely, and says what it knows.

The one idea: a guess is worth the number of different answers it can get. The choice depends on the
candidates alone, so it is remembered: all games share the top of one decision tree.
"""

import functools

from envs.game import Move, Policy
from envs.wordle.tasks import WORD_LENGTH, feedback, still_possible, vocabulary

# Splits the vocabulary into the most parts of all words; found by trying them all, once.
OPENING = "slate"
# Among more candidates than these, one of them is a good enough guess and much faster to find.
FEW = 30


def oracle(_: int) -> Policy:
    """A policy that finds any word of the vocabulary; it knows the rules, not the item."""
    candidates = vocabulary()
    guess = ""
    known: list[tuple[str, str]] = []

    def policy(observation: str) -> Move:
        nonlocal candidates, guess
        answer = "".join(observation.split())
        if guess and len(answer) == WORD_LENGTH:
            known.append((guess, answer))
            candidates = still_possible(candidates, guess, answer)
        guess = OPENING if not known else best_guess(candidates)
        return Move(_thought(known, candidates, guess), " ".join(guess))

    return policy


@functools.cache
def best_guess(candidates: tuple[str, ...]) -> str:
    """The word with the most different answers; among equals one that can be the hidden word."""
    best, most = candidates[0], 0
    others = vocabulary() if len(candidates) <= FEW else ()
    for word in (*candidates, *others):
        answers = len({feedback(word, candidate) for candidate in candidates})
        if answers > most:
            best, most = word, answers
        if most == len(candidates):
            break
    return best


def _thought(known: list[tuple[str, str]], candidates: tuple[str, ...], guess: str) -> str:
    if not known:
        return f'I know nothing yet. "{guess}" has common letters, so it tells much.'
    places = ["_"] * WORD_LENGTH
    present: set[str] = set()
    absent: set[str] = set()
    for word, answer in known:
        for index, (letter, mark) in enumerate(zip(word, answer, strict=True)):
            if mark == "g":
                places[index] = letter
            (absent if mark == "b" else present).add(letter)
    facts = f"The word looks like {' '.join(places)}"
    if hidden := sorted(present - set(places)):
        facts += f", contains {', '.join(hidden)}"
    if absent:
        facts += f", and has no {', '.join(sorted(absent))}"
    if len(candidates) == 1:
        return f'{facts}. Only "{guess}" fits.'
    if guess in candidates:
        return f'{facts}. {len(candidates)} words fit, "{guess}" is one of them.'
    return f'{facts}. {len(candidates)} words fit; "{guess}" tells them apart best.'
