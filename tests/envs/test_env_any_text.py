"""Whatever an agent writes, a game answers: no text is an exception."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.registry import load

# Arbitrary text, and text that begins like an action and then goes wrong.
ACTIONS = st.one_of(
    st.text(),
    st.builds(
        lambda verb, rest: verb + rest,
        st.sampled_from(
            ["get 1 ", "get ", "craft 1 ", "craft 1 stick using ", "move ", "s l a t "]
        ),
        st.text(),
    ),
)


@pytest.mark.parametrize("name", ["textcraft", "maze", "wordle"])
@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=8))
def test_any_text_is_an_action(name: str, actions: list[str]) -> None:
    spec = load(name)
    game = spec.new_game()
    game.reset(11)
    for action in actions:
        step = game.step(action)
        assert step.reward in (0, 1) and len(step.observation) < 1000
        if step.done:
            game.reset(11)
