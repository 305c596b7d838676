"""Tools of environments: calls become the actions that servers read, and back."""

import json
from typing import Any

import pytest
from scripted_servers import TRANSCRIPTS

from envs.registry import ENVIRONMENTS as EMBEDDED
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import ENVIRONMENTS
from manus_jax.agentgym.tools import ACT, Tool, ToolUseError, read_tools

JSON_TYPES = {"string", "integer", "number", "boolean", "array", "object"}


def tool_of(env: str, name: str) -> Tool:
    return next(tool for tool in PROMPTS[env].tools if tool.name == name)


@pytest.mark.parametrize(
    ("env", "name", "arguments", "action"),
    [
        ("maze", "move", {"direction": "up"}, "move up"),
        ("textcraft", "get", {"count": 2, "item": "oak logs"}, "get 2 oak logs"),
        (
            "textcraft",
            "craft",
            {"count": 4, "item": "stick", "ingredients": "2 oak planks, 1 log"},
            "craft 4 stick using 2 oak planks, 1 log",
        ),
        ("textcraft", "inventory", {}, "inventory"),
        ("wordle", "guess", {"letters": "s h i r e"}, "s h i r e"),
        ("sqlgym", "query", {"sql": "SELECT 1"}, "SELECT 1"),
        ("webshop", "search", {"words": "red {shirt}"}, "search[red {shirt}]"),
        ("webshop", "click", {"text": "buy now"}, "click[buy now]"),
        ("searchqa", "answer", {"text": "Paris"}, "<answer>Paris</answer>"),
        (
            "webarena",
            "type",
            {"id": 164, "text": "zoo", "press_enter": "1"},
            "```type [164] [zoo] [1]```",
        ),
        (
            "todo",
            "update_project",
            {"project_id": "1020", "is_favorite": True},
            "Action: update_project with Action Input: {'project_id': '1020', 'is_favorite': True}",
        ),
        (
            "weather",
            "finish",
            {"answer": [1.5]},
            "Action: finish with Action Input: {'answer': [1.5]}",
        ),
    ],
)
def test_a_call_becomes_an_action_and_back(
    env: str, name: str, arguments: dict[str, Any], action: str
) -> None:
    tool = tool_of(env, name)
    assert tool.command(arguments) == action
    assert tool.arguments(action) == arguments
    assert [t.name for t in PROMPTS[env].tools if t.arguments(action) is not None] == [name]


def test_the_default_tool_takes_any_action() -> None:
    assert ACT.command({"command": "go to fridge 1"}) == "go to fridge 1"
    assert ACT.arguments("go to fridge 1") == {"command": "go to fridge 1"}


@pytest.mark.parametrize(
    ("env", "name", "arguments", "problem"),
    [
        ("maze", "move", {"direction": "north"}, "'direction' of .* one of up, down, left, right"),
        ("maze", "move", {}, r"move\(direction\) needs the argument 'direction'"),
        ("maze", "move", {"direction": "up", "steps": 2}, "no argument 'steps'"),
        ("maze", "move", {"direction": ["up"]}, "one of up"),
        ("textcraft", "get", {"count": "two", "item": "log"}, "'count' .* type integer"),
        ("textcraft", "get", {"count": True, "item": "log"}, "'count' .* type integer"),
        ("weather", "get_elevation", {"latitude": "x", "longitude": 1}, "type number"),
        ("todo", "update_project", {"project_id": "1", "is_favorite": 1}, "type boolean"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    env: str, name: str, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ToolUseError, match=problem):
        tool_of(env, name).command(arguments)


@pytest.mark.parametrize("env", sorted(ENVIRONMENTS))
def test_schemas_are_json_schemas_and_examples_are_calls(env: str) -> None:
    tools = PROMPTS[env].tools or (ACT,)
    for tool in tools:
        function = json.loads(json.dumps(tool.schema()))["function"]
        assert function["name"] and function["description"]
        parameters = function["parameters"]
        assert parameters["type"] == "object"
        assert set(parameters["required"]) <= set(parameters["properties"])
        for about in parameters["properties"].values():
            assert about.get("type", "string") in JSON_TYPES
    for example in PROMPTS[env].examples:
        calls = [(t, a) for t in tools if (a := t.arguments(example.action)) is not None]
        assert len(calls) == 1


@pytest.mark.parametrize("env", ["weather", "movie", "todo"])
def test_the_tools_are_those_that_the_server_names(env: str) -> None:
    answers = (TRANSCRIPTS / f"{env}.jsonl").read_text()
    listing = answers[answers.index("following valid actions") :].partition("]")[0]
    assert {tool.name for tool in PROMPTS[env].tools} == set(listing.split("'")[1::2])


def test_the_parameters_of_weather_are_those_of_its_server() -> None:
    from envs.weather.tools import TOOLS

    assert "weather" in EMBEDDED
    for tool in PROMPTS["weather"].tools:
        if tool.name in TOOLS:
            assert tuple(tool.parameters) == TOOLS[tool.name].arguments


def test_optional_parameters_may_be_left_out() -> None:
    tool = tool_of("sheet", "filter_cells")
    assert tool.command({"query": "x"}) == "Action: filter_cells with Action Input: {'query': 'x'}"
    assert tool.schema()["function"]["parameters"]["required"] == ["query"]


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ({"parameters": {"n": "float"}}, "'float' is none of the types"),
        ({"parameters": {"n": "string"}, "action": "go"}, "must use every parameter"),
        ({"action": "go {where}"}, "must use every parameter"),
    ],
)
def test_a_wrong_declaration_is_an_error(tool: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tools({"tools": {"x": {"description": "", **tool}}})
