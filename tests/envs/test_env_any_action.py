"""No text of an agent causes an exception."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.registry import load

# Texts that begin like an action, and then go on or end in any way.
BEGINNINGS = {
    "textcraft": ["get 1 ", "get ", "craft 1 ", "craft 1 stick using "],
    "maze": ["move ", "move up"],
    "wordle": ["s l a t ", "slat"],
    "babyai": ["go to ", "pickup ", "toggle and go through ", "go through ", "turn "],
    "alfworld": ["go to cabinet 1", "go to ", "take apple 1 from ", "put ", "open ", "heat "],
    "sqlgym": ["SELECT ", "SELECT * FROM customer WHERE ", "WITH x AS (", "'", "PRAGMA "],
    "webshop": ["search[", "click[", "search[lamp]", "click[back to search]", "click[b0"],
    "weather": [
        "Action: finish with Action Input: ",
        'Action: finish with Action Input: {"answer": ',
        'Action: get_elevation with Action Input: {"latitude": ',
        'Action: get_latitude_longitude with Action Input: {"name": "',
        "Action: ",
    ],
}
ENDINGS = st.one_of(st.text(), st.sampled_from(["]", "}", '"}', "1}", "[1, 2]}", "red ball 1"]))


@pytest.mark.parametrize("name", BEGINNINGS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_is_an_action(name: str, data: st.DataObject) -> None:
    beginnings = st.sampled_from(["", *BEGINNINGS[name]])
    game = load(name).new_game()
    game.reset(11)
    for _ in range(4):
        step = game.step(data.draw(beginnings) + data.draw(ENDINGS))
        assert 0 <= step.reward <= 1 and len(step.observation) < 20_000
        if step.done:
            game.reset(11)
