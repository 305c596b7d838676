"""The opening of an episode tells the game, the form of an answer, and what is seen first."""

import pytest

from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import ENVIRONMENTS, environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.rollout.action_formats import FORMATS, format_for
from manus_jax.rollout.prompts import (
    ACKNOWLEDGEMENT,
    cut_middle,
    opening,
    rejoined,
)

MAZE = Task("maze", 3, "maze_3")


def roles(messages: tuple[Message, ...]) -> list[str]:
    return [message.role for message in messages]


@pytest.mark.bug("B24")
@pytest.mark.parametrize("env", sorted(ENVIRONMENTS))
@pytest.mark.parametrize("layout", ["user", "system", "acknowledged"])
def test_every_environment_is_told_its_game_and_the_form_that_will_be_parsed(env, layout) -> None:
    for action_format in FORMATS.values():
        row = environment(env)
        if row.action not in action_format.styles:
            continue
        chosen = format_for(row, action_format.name)
        settings = RolloutSettings(prompt_layout=layout)
        messages = opening(Task(env, 0, f"{env}_0"), chosen, settings).messages("What you see.")
        text = "\n".join(message.content for message in messages)
        assert PROMPTS[env].instruction in text
        assert chosen.instruction in text
        assert all(action in text for action in PROMPTS[env].actions)
        example = PROMPTS[env].examples[0]
        assert chosen.render(example.thought, example.action) in text
        assert messages[-1].role == "user"
        assert messages[-1].content.endswith("What you see.")


def test_layouts() -> None:
    def laid_out(layout: str) -> tuple[Message, ...]:
        return opening(MAZE, FORMATS["act"], RolloutSettings(prompt_layout=layout)).messages("seen")

    assert roles(laid_out("user")) == ["user"]
    assert roles(laid_out("system")) == ["system", "user"]
    assert roles(laid_out("acknowledged")) == ["user", "assistant", "user"]
    assert laid_out("acknowledged")[1].content == ACKNOWLEDGEMENT
    assert laid_out("system")[1].content == laid_out("acknowledged")[2].content == "seen"


def test_examples_can_be_left_out() -> None:
    without = opening(MAZE, FORMATS["react"], RolloutSettings(prompt_examples=0)).messages("seen")
    assert "For example, this observation" not in without[0].content


def test_a_datasets_prompt_comes_in_place_of_the_environments() -> None:
    told = "Find the exit. Write Thought: and Action: lines."
    task = Task("maze", 3, "maze_3", prompt=(Message("user", told),))
    settings = RolloutSettings(prompt_source="dataset", prompt_layout="acknowledged")
    messages = opening(task, FORMATS["react"], settings).messages("seen")
    assert messages == (
        Message("user", told),
        Message("assistant", ACKNOWLEDGEMENT),
        Message("user", "seen"),
    )
    settings = RolloutSettings(prompt_source="dataset")
    joined = opening(task, FORMATS["react"], settings).messages("seen")
    assert joined == (Message("user", f"{told}\n\nseen"),)


def test_a_datasets_prompt_that_shows_another_form_is_told_the_one_that_is_parsed() -> None:
    task = Task("maze", 3, "maze_3", prompt=(Message("user", "Answer with <answer> tags."),))
    settings = RolloutSettings(prompt_source="dataset")
    [message] = opening(task, FORMATS["act"], settings).messages("seen")
    assert message.content.startswith("Answer with <answer> tags.")
    assert FORMATS["act"].instruction in message.content


def test_a_dataset_prompt_with_a_system_turn_keeps_it() -> None:
    prompt = (Message("system", "Action: is what counts"), Message("user", "Go."))
    task = Task("maze", 3, "maze_3", prompt=prompt)
    for layout, wanted in (
        ("user", ["system", "user"]),
        ("system", ["system", "user"]),
        ("acknowledged", ["system", "user", "assistant", "user"]),
    ):
        settings = RolloutSettings(prompt_source="dataset", prompt_layout=layout)
        assert roles(opening(task, FORMATS["react"], settings).messages("seen")) == wanted


def test_a_row_without_a_prompt_falls_back_to_the_environments() -> None:
    settings = RolloutSettings(prompt_source="dataset")
    [message] = opening(MAZE, FORMATS["react"], settings).messages("seen")
    assert PROMPTS["maze"].instruction in message.content


def test_a_long_text_is_cut_in_the_middle_and_says_how_much() -> None:
    text = "a" * 60 + "b" * 40
    cut = cut_middle(text, 10)
    assert cut == "aaaaa\n[... 90 characters are left out here ...]\nbbbbb"
    assert cut_middle(text, 100) == text
    assert cut_middle(text, 1) == "a\n[... 99 characters are left out here ...]\n"
    assert cut_middle("", 0) == ""


def test_what_memory_leaves_out_is_said() -> None:
    text = rejoined("the goal", 4, "the newest")
    assert text.startswith("the goal\n\n[4 earlier turns are left out here.")
    assert text.endswith("\n\nthe newest")


@pytest.mark.parametrize(
    "wrong", [{"prompt_source": "x"}, {"prompt_layout": "x"}, {"prompt_examples": -1}]
)
def test_wrong_settings_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="prompt"):
        RolloutSettings(**wrong)


def test_an_agent_that_needs_no_telling_opens_with_the_observation_alone() -> None:
    settings = RolloutSettings(prompt_source="observation")
    [message] = opening(MAZE, FORMATS["react"], settings).messages("seen")
    assert (message.role, message.content) == ("user", "seen")
