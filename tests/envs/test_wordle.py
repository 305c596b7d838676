"""Wordle: AgentGym's feedback, the vocabulary, and an oracle."""

import pytest

from envs.game import GameError
from envs.wordle.game import Wordle
from envs.wordle.oracle import oracle
from envs.wordle.tasks import feedback, hidden_word, items, vocabulary


def item_hiding(word: str) -> int:
    return next(item for item in range(len(vocabulary())) if hidden_word(item) == word)


@pytest.mark.parametrize(
    ("guess", "word", "answer"),
    [
        ("panic", "mount", "bbybb"),
        ("solar", "mount", "bgbbb"),
        # The second o is present too, although the word has only one: AgentGym's rule.
        ("robot", "mount", "bgbyg"),
        ("light", "mount", "bbbbg"),
        ("solar", "aroma", "bybyy"),
        ("aroma", "aroma", "ggggg"),
    ],
)
def test_feedback_is_that_of_the_recorded_games(guess: str, word: str, answer: str) -> None:
    assert feedback(guess, word) == answer


def test_six_tries_count_invalid_words_and_end_the_game_unsolved() -> None:
    game = Wordle()
    assert game.reset(item_hiding("mount")) == "Let's start Wordle!"
    guesses = ["p a n i c", "zzzzz", "solar", "S O L A R", "r o b o t", "l i g h t"]
    steps = [game.step(guess) for guess in guesses]
    assert [step.observation for step in steps] == [
        "b b y b b\n",
        "invalid word",
        "b g b b b\n",
        "b g b b b\n",
        "b g b y g\n",
        "b b b b g\n",
    ]
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert [step.reward for step in steps] == [0] * 6
    with pytest.raises(GameError, match="finished"):
        game.step("mount")


def test_the_right_word_wins_at_once_and_each_guess_narrows_the_candidates() -> None:
    game = Wordle()
    assert game.candidates() == vocabulary()
    game.reset(item_hiding("aroma"))
    game.step("p a n i c")
    left = game.candidates()
    assert "aroma" in left and "panic" not in left
    assert all("a" in word and word[1] != "a" and not set("pnic") & set(word) for word in left)
    assert set(left) == {
        word
        for word in vocabulary()
        if "a" in word and word[1] != "a" and not set("pnic") & set(word)
    }
    game.step("not a word")
    assert game.candidates() == left
    step = game.step("a r o m a")
    assert (step.observation, step.reward, step.done) == ("g g g g g\n", 1, True)


def test_a_game_refuses_calls_that_the_protocol_forbids() -> None:
    game = Wordle()
    with pytest.raises(GameError, match="not been reset"):
        game.step("aroma")
    for unknown in (-1, len(vocabulary())):
        with pytest.raises(GameError, match=f"seed {unknown} is not valid"):
            game.reset(unknown)


def test_the_vocabulary_is_a_thousand_words_of_five_letters() -> None:
    words = vocabulary()
    assert len(words) >= 1000 and list(words) == sorted(set(words))
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in words)


def test_train_and_test_share_no_word_and_cover_the_vocabulary() -> None:
    train, test = ([hidden_word(item) for item in items(split)] for split in ("train", "test"))
    assert not set(train) & set(test)
    assert sorted([*train, *test]) == list(vocabulary())


@pytest.mark.slow
def test_the_oracle_finds_every_test_word_in_six_tries() -> None:
    for item in items("test"):
        game = Wordle()
        observation = game.reset(item)
        policy = oracle(item)
        for _ in range(6):
            move = policy(observation)
            step = game.step(move.action)
            observation = step.observation
            if step.done:
                break
        assert step.done and step.reward == 1, hidden_word(item)
