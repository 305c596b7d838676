"""Tool calls in the syntax of models: text to calls, and calls to text.

Qwen and Hermes models write JSON between <tool_call> and </tool_call>; Llama models write a bare
JSON object with "parameters" in place of "arguments". `parse_tool_calls` reads both, because models
also confuse them. In prompts, calls are written by the model's own chat template (`ChatStream`);
`render_tool_call` is for texts that no template writes.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_NESTING = 20
"""Of brackets in JSON and code: parsers recurse on the C stack, which is small in threads."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_GAP = re.compile(r"[;\s]*")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class ToolCallError(ValueError):
    """The text of a call cannot be read; the message is meant for the model."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the tool `name`."""

    name: str
    arguments: Mapping[str, Any]

    def record(self) -> dict[str, Any]:
        """The call as in OpenAI's messages, which chat templates read."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "function": function}


def parse_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text before the calls, and the calls, in order; no calls if there are none.

    Raises ToolCallError for a call that cannot be read. The last call needs no closing tag, which
    a model may leave out at the end of its turn. Takes time linear in the length of the text.
    """
    if _OPEN in text:
        before, *parts = text.split(_OPEN)
        return before.strip(), tuple(_read_call(part.partition(_CLOSE)[0]) for part in parts)
    start = text.find("{")
    if start < 0:
        return text.strip(), ()
    before = text[:start].removesuffix("```json\n").replace("<|python_tag|>", "")
    return before.strip(), tuple(map(_call, _objects(text[start:])))


def inside_call(text: str) -> bool:
    """Whether a text ends within a tool call."""
    return _CLOSE not in text.rpartition(_OPEN)[2] and _OPEN in text


def render_tool_call(call: ToolCall) -> str:
    """The call in the syntax of Qwen and Hermes models."""
    content = {"name": call.name, "arguments": dict(call.arguments)}
    return f"{_OPEN}\n{json.dumps(content, ensure_ascii=False)}\n{_CLOSE}"


def calls_from_records(records: Sequence[Any]) -> tuple[ToolCall, ...]:
    """The calls of a message's `tool_calls`; ToolCallError if they are not in OpenAI's form."""
    return tuple(map(_call, records))


def parse_json(text: str) -> Any:
    """`json.loads` for the text of a model; ToolCallError if it is not JSON or nested too deep."""
    check_nesting(text)
    try:
        return json.loads(text, strict=False)
    except ValueError as error:
        raise ToolCallError(f"this is not one JSON object ({error}).") from None


def check_nesting(text: str) -> None:
    """Raises ToolCallError if brackets are nested too deep to parse the text in a thread."""
    depth = deepest = 0
    for mark in re.finditer(r"[][(){}]", text):
        depth += _BRACKETS[mark[0]]
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise ToolCallError("the brackets are too deeply nested.")


def _read_call(text: str) -> ToolCall:
    return _call(parse_json(text.strip()))


def _objects(text: str) -> list[Any]:
    """The JSON objects at the start of a text, with at most ; or white space between them."""
    check_nesting(text)
    decoder, found, at = json.JSONDecoder(strict=False), [], 0
    while at < len(text) and text[at] == "{":
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError as error:
            raise ToolCallError(f"this is not one JSON object ({error}).") from None
        found.append(value)
        at = _GAP.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
    return found


def _call(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ToolCallError('a tool call is a JSON object with "name" and "arguments".')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # as in OpenAI's API
        arguments = parse_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ToolCallError(f'"arguments" of {name} must be a JSON object.')
    return ToolCall(name, arguments)
