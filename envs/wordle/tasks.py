"""The vocabulary, the hidden word of each item, and the feedback for a guess.

An item is a position in the vocabulary sorted by digest, so every item has its own word and
neighbouring items are unrelated. The feedback is that of AgentGym's Wordle, where a letter counts
as present however often it was guessed.
"""

import functools
import hashlib
from pathlib import Path

from envs.game import GameError, fixed_splits

WORD_LENGTH = 5
MAX_TRIES = 6
SOLVED = "g" * WORD_LENGTH
TEST_WORDS = 150


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """All words that can be guessed or hidden, in alphabetical order."""
    text = Path(__file__).with_name("vocabulary.txt").read_text(encoding="utf-8")
    return tuple(text.split())


@functools.cache
def _hidden_words() -> tuple[str, ...]:
    def digest(word: str) -> bytes:
        return hashlib.blake2b(word.encode(), digest_size=8).digest()

    return tuple(sorted(vocabulary(), key=digest))


items = fixed_splits(
    train=range(0, len(vocabulary()) - TEST_WORDS),
    test=range(len(vocabulary()) - TEST_WORDS, len(vocabulary())),
)


def hidden_word(item: int) -> str:
    """The word of an item; GameError for an unknown item."""
    words = _hidden_words()
    if not 0 <= item < len(words):
        raise GameError(f"The seed {item} is not valid: there are 0 to {len(words) - 1}.")
    return words[item]


def feedback(guess: str, word: str) -> str:
    """One letter per position: g right place, y elsewhere in the word, b not in the word."""
    return "".join(
        "g" if letter == hidden else "y" if letter in word else "b"
        for letter, hidden in zip(guess, word, strict=True)
    )


def still_possible(words: tuple[str, ...], guess: str, answer: str) -> tuple[str, ...]:
    """The words for which the guess gets this answer."""
    return tuple(word for word in words if feedback(guess, word) == answer)
