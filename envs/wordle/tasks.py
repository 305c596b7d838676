"""The words: the vocabulary, the hidden word of each item, and what a guess tells about a word.

The one idea: an item is a position in the vocabulary sorted by digest, so that every item has its
own word, the splits share none, and neighbouring items have nothing in common. The feedback is that
of AgentGym's Wordle, where a letter counts as present however often it was guessed.
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
    """All words that may be guessed or hidden, in alphabetical order."""
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
    """The word of an item; GameError when there is none."""
    words = _hidden_words()
    if not 0 <= item < len(words):
        raise GameError(f"The seed {item} is not valid: there are 0 to {len(words) - 1}.")
    return words[item]


def feedback(guess: str, word: str) -> str:
    """Five letters: g the right place, y elsewhere in the word, b not in the word."""
    return "".join(
        "g" if letter == hidden else "y" if letter in word else "b"
        for letter, hidden in zip(guess, word, strict=True)
    )


def still_possible(words: tuple[str, ...], guess: str, answer: str) -> tuple[str, ...]:
    """The words that would have given this answer to the guess."""
    return tuple(word for word in words if feedback(guess, word) == answer)
