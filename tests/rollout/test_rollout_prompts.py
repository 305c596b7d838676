"""The opening of an episode has the game, the answer format and the first observation."""

import dataclasses

import pytest

from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import ENVIRONMENTS, environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.data.tool_calls import ToolCall
from manus_jax.rollout.action_formats import FORMATS, format_for
from manus_jax.rollout.prompts import (
    ACKNOWLEDGEMENT,
    TASK_BEGINS,
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
@pytest.mark.parametrize("examples", ["turns", "inline"])
def test_the_prompt_of_every_environment_describes_its_game_and_the_format_that_is_parsed(
    env, layout, examples
) -> None:
    for action_format in FORMATS.values():
        row = environment(env)
        if row.action not in action_format.styles:
            continue
        chosen = format_for(row, action_format.name)
        settings = RolloutSettings(prompt_layout=layout, example_layout=examples)
        messages = opening(Task(env, 0, f"{env}_0"), chosen, settings).messages("What you see.")
        text = "\n".join(message.text for message in messages)
        assert PROMPTS[env].instruction in text
        assert chosen.instruction in text
        if chosen.tools and PROMPTS[env].tools:
            assert [tool.schema() for tool in PROMPTS[env].tools] == list(chosen.tools)
        else:
            assert all(action in text for action in PROMPTS[env].actions)
        example = PROMPTS[env].examples[0]
        assert chosen.render(example.thought, example.action) in text
        assert messages[-1].role == "user"
        assert messages[-1].content.endswith("What you see.")


def test_layouts_with_the_examples_in_the_instruction() -> None:
    def laid_out(layout: str) -> tuple[Message, ...]:
        settings = RolloutSettings(prompt_layout=layout, example_layout="inline")
        return opening(MAZE, FORMATS["act"], settings).messages("seen")

    assert roles(laid_out("user")) == ["user"]
    assert roles(laid_out("system")) == ["system", "user"]
    assert roles(laid_out("acknowledged")) == ["user", "assistant", "user"]
    assert laid_out("acknowledged")[1].content == ACKNOWLEDGEMENT
    assert laid_out("system")[1].content == laid_out("acknowledged")[2].content == "seen"


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        ("user", ["user", "assistant", "user"]),
        ("system", ["system", "user", "assistant", "user"]),
        ("acknowledged", ["user", "assistant", "user", "assistant", "user"]),
    ],
)
def test_examples_are_turns_before_the_task_by_default(layout, wanted) -> None:
    settings = RolloutSettings(prompt_layout=layout)
    messages = opening(MAZE, FORMATS["act"], settings).messages("seen")
    [example] = PROMPTS["maze"].examples
    assert roles(messages) == wanted
    assert messages[-3].content.endswith(f"Example observation:\n\n{example.observation}")
    assert messages[-2].content == FORMATS["act"].render(example.thought, example.action)
    assert messages[-1].content == f"{TASK_BEGINS}\n\nseen"
    assert example.observation not in messages[-1].content


def test_several_examples_are_several_turns() -> None:
    prompt = PROMPTS["maze"]
    try:
        PROMPTS["maze"] = dataclasses.replace(prompt, examples=prompt.examples * 3)
        messages = opening(MAZE, FORMATS["act"], RolloutSettings(prompt_examples=2)).messages("x")
    finally:
        PROMPTS["maze"] = prompt
    assert roles(messages) == ["user", "assistant", "user", "assistant", "user"]


def test_the_example_of_a_tool_format_is_a_tool_call() -> None:
    action_format = format_for(environment("maze"), "tool_call")
    _, example, _ = opening(MAZE, action_format, RolloutSettings()).messages("seen")
    assert example.content == PROMPTS["maze"].examples[0].thought
    assert example.tool_calls == (ToolCall("move", {"direction": "down"}),)


@pytest.mark.parametrize("layout", ["turns", "inline"])
def test_examples_can_be_left_out(layout: str) -> None:
    settings = RolloutSettings(prompt_examples=0, example_layout=layout)
    [message] = opening(MAZE, FORMATS["react"], settings).messages("seen")
    assert PROMPTS["maze"].examples[0].observation not in message.content
    assert TASK_BEGINS not in message.content


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


def test_the_parsed_format_is_added_to_a_datasets_prompt_that_shows_another_one() -> None:
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
    first = opening(MAZE, FORMATS["react"], settings).messages("seen")[0]
    assert PROMPTS["maze"].instruction in first.content


def test_a_long_text_is_cut_in_the_middle_and_says_how_much() -> None:
    text = "a" * 60 + "b" * 40
    cut = cut_middle(text, 10)
    assert cut == "aaaaa\n[... 90 characters are left out here ...]\nbbbbb"
    assert cut_middle(text, 100) == text
    assert cut_middle(text, 1) == "a\n[... 99 characters are left out here ...]\n"
    assert cut_middle("", 0) == ""


def test_a_note_replaces_the_turns_that_memory_omits() -> None:
    text = rejoined("the goal", 4, "the newest")
    assert text.startswith("the goal\n\n[4 earlier turns are left out here.")
    assert text.endswith("\n\nthe newest")


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_source": "x"},
        {"prompt_layout": "x"},
        {"prompt_examples": -1},
        {"example_layout": "x"},
    ],
)
def test_wrong_settings_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RolloutSettings(**wrong)


def test_an_agent_that_needs_no_telling_opens_with_the_observation_alone() -> None:
    settings = RolloutSettings(prompt_source="observation")
    [message] = opening(MAZE, FORMATS["react"], settings).messages("seen")
    assert (message.role, message.content) == ("user", "seen")
