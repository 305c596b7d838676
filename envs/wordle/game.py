"""Wordle: six tries to find a hidden word of five letters.

Observations are those of AgentGym's Wordle ("b y g b b"), and a guess outside the vocabulary costs
a try. The words that still fit are computed only when the protocol's route asks for them, which it
may do before the first reset.
"""

import re
from collections.abc import Sequence

from envs.game import GameError, Step
from envs.wordle.tasks import (
    MAX_TRIES,
    SOLVED,
    feedback,
    hidden_word,
    still_possible,
    vocabulary,
)

START = "Let's start Wordle!"
_KNOWN_WORDS = frozenset(vocabulary())
_COMMON_LETTERS = ("slate", "crony", "pudgy", "bight", "flame")


class Wordle:
    """One session: a hidden word, and the guesses so far with their answers."""

    def __init__(self) -> None:
        self._word: str | None = None
        self._answers: list[tuple[str, str]] = []
        self._tries = 0
        self._observation = ""
        self._done = False

    def reset(self, item: int) -> str:
        self._word = hidden_word(item)
        self._answers = []
        self._tries = 0
        self._done = False
        self._observation = START
        return START

    def step(self, action: str) -> Step:
        if self._word is None:
            raise GameError("The game has not been reset.")
        if self._done:
            raise GameError("The game has finished.")
        self._tries += 1
        guess = "".join(action.split()).lower()
        answer = None
        if guess in _KNOWN_WORDS:
            answer = feedback(guess, self._word)
            self._answers.append((guess, answer))
        self._observation = "invalid word" if answer is None else " ".join(answer) + "\n"
        self._done = answer == SOLVED or self._tries == MAX_TRIES
        return Step(self._observation, int(answer == SOLVED), self._done)

    def observation(self) -> str:
        if self._word is None:
            raise GameError("The game has not been reset.")
        return self._observation

    def candidates(self) -> tuple[str, ...]:
        """The words consistent with all answers so far."""
        words = vocabulary()
        for guess, answer in self._answers:
            words = still_possible(words, guess, answer)
        return words

    def close(self) -> None:
        self._word = None


def plausible_actions(observations: Sequence[str]) -> Sequence[str]:
    """The words that the first observation lists, else a few words with common letters."""
    words = re.findall(r"\b[a-z]{5}\b", observations[0].partition("one of:")[2])
    return [" ".join(word) for word in words or _COMMON_LETTERS]
