"""The Wordle oracle: guesses the word with the most different possible answers.

The choice depends only on the remaining candidates, so it is cached: all games share the top of one
decision tree.
"""

import functools

from envs.game import Move, Policy
from envs.wordle.tasks import WORD_LENGTH, feedback, still_possible, vocabulary

# The word that splits the vocabulary into the most groups, found by trying all words.
OPENING = "slate"
# With more candidates than this, only candidates are considered as guesses, which is much faster.
FEW = 30


def oracle(_: int) -> Policy:
    """A policy that finds any word of the vocabulary without knowing the item."""
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
    """The word with the most different answers, preferably one that can be the hidden word."""
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
