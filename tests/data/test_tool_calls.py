"""Tool calls are read in the syntax of Qwen, Hermes and Llama models, and written by templates."""

import contextlib
import json
from typing import Any

import pytest
from chat_templates import LLAMA, OPENING, QWEN3, QWEN25, tokenizer_with
from hypothesis import given, settings
from hypothesis import strategies as st

from manus_jax.data.chat import (
    CHATML,
    ChatStream,
    ChatTemplateError,
    ConversationError,
    Message,
    message_from_record,
)
from manus_jax.data.tasks import DatasetError, read_tasks
from manus_jax.data.tool_calls import ToolCall, ToolCallError, parse_tool_calls, render_tool_call

UP = ToolCall("move", {"direction": "up"})
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Moves.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string"}},
            "required": ["direction"],
        },
    },
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Qwen and Hermes
        ('<tool_call>\n{"name": "move", "arguments": {"direction": "up"}}\n</tool_call>', [UP]),
        (
            'I go.\n<tool_call>{"arguments": {"direction": "up"}, "name": "move"}</tool_call> ok',
            [UP],
        ),
        ('<tool_call>\n{"name": "move", "arguments": {"direction": "up"}}', [UP]),
        ('<tool_call>\n{"name": "look"}\n</tool_call>', [ToolCall("look", {})]),
        (f"{render_tool_call(UP)}\n{render_tool_call(UP)}", [UP, UP]),
        # Llama
        ('{"name": "move", "parameters": {"direction": "up"}}', [UP]),
        ('<|python_tag|>{"name": "move", "parameters": {"direction": "up"}}', [UP]),
        ('{"type": "function", "name": "move", "parameters": {"direction": "up"}} ', [UP]),
        ('{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', None),
        ('```json\n{"name": "move", "arguments": {"direction": "up"}}\n```', [UP]),
        # OpenAI
        ('{"function": {"name": "move", "arguments": "{\\"direction\\": \\"up\\"}"}}', [UP]),
        ("I do not know.", []),
        ("", []),
    ],
)
def test_calls_are_read(text: str, expected: list[ToolCall] | None) -> None:
    if expected is None:
        expected = [ToolCall("a", {}), ToolCall("b", {})]
    assert list(parse_tool_calls(text)[1]) == expected


def test_the_text_before_a_call_is_kept() -> None:
    assert parse_tool_calls(f"I go up.\n{render_tool_call(UP)}") == ("I go up.", (UP,))
    assert parse_tool_calls("<|python_tag|>" + json.dumps({"name": "look"}))[0] == ""
    assert parse_tool_calls("Nothing to do.") == ("Nothing to do.", ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>\nmove up\n</tool_call>", "not one JSON object"),
        ('<tool_call>\n{"name": "move", "arguments": {"dir', "not one JSON object"),
        ('<tool_call>\n{"tool": "move"}\n</tool_call>', 'with "name" and "arguments"'),
        ('<tool_call>\n["move"]\n</tool_call>', 'with "name" and "arguments"'),
        ('<tool_call>{"name": "move", "arguments": ["up"]}</tool_call>', "must be a JSON object"),
        ('{"direction": "up"}', 'with "name" and "arguments"'),
        ('{"name": "move", "arguments": ' + '{"a":' * 30 + "1" + "}" * 31, "too deeply nested"),
        ('{"name": "move", "arguments": {"n": ' + "9" * 5000 + "}}", "not one JSON object"),
    ],
)
def test_calls_that_cannot_be_read_say_why(text: str, problem: str) -> None:
    with pytest.raises(ToolCallError, match=problem):
        parse_tool_calls(text)


@settings(max_examples=100, deadline=None)
@given(st.text() | st.text(st.sampled_from('{}[]":,name<tool_call>/ \n'), max_size=200))
def test_any_text_gives_calls_or_an_error(text: str) -> None:
    try:
        parse_tool_calls(text)
    except ToolCallError as error:
        assert str(error)


@pytest.mark.parametrize("unit", ["<tool_call>", "</tool_call>", "{", '{"name": "a"}', "{};", "}"])
def test_huge_texts_are_read_in_one_pass(unit: str) -> None:
    with contextlib.suppress(ToolCallError):
        parse_tool_calls(unit * (400_000 // len(unit)))


# templates


@pytest.mark.parametrize(("template", "role"), [(QWEN3, "tool"), (QWEN25, "tool"), (LLAMA, "tool")])
def test_templates_show_tools_and_write_calls_that_are_read_back(template: str, role: str) -> None:
    tokenizer = tokenizer_with(template)
    stream = ChatStream(tokenizer)
    assert stream.reply_role([TOOL]) == role
    said = Message("assistant", "", True, (UP,))
    messages = [Message("user", "Go up."), said, Message("tool", "You moved.")]
    ids = stream.start(messages, [TOOL])
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Go up."},
            {"role": "assistant", "content": "", "tool_calls": [UP.record()]},
            {"role": "tool", "content": "You moved."},
        ],
        tools=[TOOL],
        add_generation_prompt=True,
        **({"date_string": "26 Jul 2024"} if template is LLAMA else {}),
    )
    assert ids == whole["input_ids"]
    assert '"name": "move"' in tokenizer.decode(stream.start(messages[:1], [TOOL]))
    [encoded] = stream.encode(messages[:2], tools=[TOOL])
    trained = tokenizer.decode(encoded.input_ids[encoded.loss_mask])
    assert parse_tool_calls(trained.rpartition("</think>")[2])[1] == (UP,)


def test_replies_come_from_the_user_where_a_template_has_no_role_for_them() -> None:
    refuse = "{%- if messages[-1].role == 'tool' %}{{- raise_exception('roles') }}{%- endif %}"
    strict = QWEN3.replace("{%- set ns", refuse + "{%- set ns", 1)
    assert ChatStream(tokenizer_with(strict)).reply_role([TOOL]) == "user"


@pytest.mark.parametrize("template", [CHATML, OPENING])
def test_a_template_without_tools_is_refused(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not show tools"):
        ChatStream(tokenizer_with(template)).reply_role([TOOL])


def test_a_template_with_calls_in_an_unknown_syntax_is_refused() -> None:
    odd = QWEN25.replace('{"name": "', "<<").replace('", "arguments": ', " with ")
    with pytest.raises(ChatTemplateError, match=r"calls in an unknown syntax: .*<<sampled with"):
        ChatStream(tokenizer_with(odd)).reply_role([TOOL])


# conversations with tool calls


def test_a_conversation_may_have_tools_and_calls(tmp_path: Any) -> None:
    calls = [{"type": "function", "function": {"name": "move", "arguments": '{"direction":"up"}'}}]
    row = {
        "messages": [
            {"role": "user", "content": "Go up."},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "You moved."},
            {"role": "assistant", "content": "Done."},
        ],
        "tools": [TOOL],
    }
    path = tmp_path / "calls.jsonl"
    path.write_text("".join(json.dumps(row | {"tools": t}) + "\n" for t in ([TOOL], "[]", None)))
    task, *others = read_tasks(path, needs="conversation")
    assert task.tools == (TOOL,) and [other.tools for other in others] == [(), ()]
    assert task.messages[1] == Message("assistant", "", True, (UP,))
    tokenizer = tokenizer_with(QWEN25)
    [encoded] = ChatStream(tokenizer).encode(task.messages, tools=task.tools)
    text = tokenizer.decode(encoded.input_ids)
    assert '{"name": "move", "arguments": {"direction": "up"}}' in text
    assert "<tool_response>\nYou moved.\n</tool_response>" in text and '"Moves."' in text
    path.write_text(json.dumps(row | {"tools": "move"}))
    with pytest.raises(DatasetError, match="'tools' is not valid JSON"):
        read_tasks(path, needs="conversation")
    path.write_text(json.dumps(row | {"tools": ["move"]}))
    with pytest.raises(DatasetError, match="'tools' must be a list of JSON schemas"):
        read_tasks(path, needs="conversation")


@pytest.mark.parametrize("calls", [[{"name": 3}], 3, ["move"]])
def test_calls_that_are_none_are_refused(calls: Any) -> None:
    with pytest.raises(ConversationError, match="'tool_calls'"):
        message_from_record({"role": "assistant", "content": "", "tool_calls": calls})
