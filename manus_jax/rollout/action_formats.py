"""Action formats: the instruction that asks the model for an action, and the parser that reads it.

A format is one object that holds the instruction, a renderer for example turns and the parser, so
that the three always agree. `FORMATS.add(ActionFormat(...))` adds a format. Parsing takes time
linear in the length of the text and evaluates no code. A text without exactly one action yields an
error message for the model, which repeats the expected form, never an empty action. Thoughts
between <think> and </think> are removed first in every format; an action inside a thought is not
executed, nor is one in a code block or tool call that the token limit cut off.
"""

import ast
import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import ActionStyle, EnvironmentRow
from manus_jax.agentgym.tools import ACT, Tool, ToolUseError
from manus_jax.data.tool_calls import (
    ToolCall,
    ToolCallError,
    check_nesting,
    inside_call,
    parse_json,
    parse_tool_calls,
    render_tool_call,
)
from manus_jax.registry import Registry

MAX_CODE = 4000
"""Limit on code: its parser recurses on the C stack, which is small in threads."""

_INSTRUCTIONS: dict[str, str] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_PARSED_STYLES: frozenset[ActionStyle] = frozenset(("line", "plain_line", "sql_block"))


@dataclasses.dataclass(frozen=True)
class ParsedAction:
    """The action for the environment, or None with an error message for the model."""

    action: str | None
    error: str = ""

    @property
    def valid(self) -> bool:
        return self.action is not None


class NoAction(Exception):
    """The text has no action or more than one; the message is shown to the model."""


@dataclasses.dataclass(frozen=True)
class ActionFormat:
    """An action format.

    `marker` is a substring of every description of the format, `render(thought, action)` writes a
    turn, and `find(turn)` returns the action of a turn or raises NoAction. `styles` are the action
    styles (see EnvironmentRow.action) that the format supports. `tools` are schemas for the chat
    template, in a format whose actions are tool calls; `with_tools` adapts it to an environment.
    """

    name: str
    instruction: str
    marker: str
    render: Callable[[str, str], str]
    find: Callable[[str], str]
    styles: frozenset[ActionStyle] = _PARSED_STYLES
    tools: tuple[dict[str, Any], ...] = ()
    with_tools: "Callable[[Sequence[Tool]], ActionFormat] | None" = None

    def parse(self, text: str, style: ActionStyle, cut: bool = False) -> ParsedAction:
        """Parses the action in a model turn, for an environment of this action style.

        `cut`: the turn was truncated at its token limit.
        """
        try:
            answer = without_thoughts(text)
            if cut and answer.count("```") % 2:
                raise NoAction("your answer was cut off inside a code block. Answer more briefly.")
            if cut and inside_call(answer):
                raise NoAction("your answer was cut off inside a tool call. Answer more briefly.")
            action = _shaped(self.find(answer), style)
            if not action:
                raise NoAction("it is empty. Write one action.")
        except (NoAction, ToolCallError, ToolUseError) as problem:
            return ParsedAction(None, f"Invalid action: {problem}{self._reminder}")
        return ParsedAction(action)

    @property
    def _reminder(self) -> str:
        """The form that the instruction describes, if it shows one."""
        form = self.instruction.partition(":\n\n")[2]
        return f"\n\nThe expected form:\n\n{form}" if form else ""


def without_thoughts(text: str) -> str:
    """The text after the last thought; NoAction if a thought is not finished.

    A template may open the thought in the prompt, so a text may start inside one.
    """
    answer = text.rpartition("</think>")[2]
    if "<think>" in answer:
        raise NoAction("the thought is not finished. Close it with </think>, then act.")
    return answer


FORMATS: Registry[ActionFormat] = Registry("action format", reserved=("auto",))


def _add(
    name: str,
    marker: str,
    render: Callable[[str, str], str],
    find: Callable[[str], str],
    *styles: ActionStyle,
) -> None:
    styles_or_default = frozenset(styles) or _PARSED_STYLES
    FORMATS.add(ActionFormat(name, _INSTRUCTIONS[name], marker, render, find, styles_or_default))


_OWN_FORM: dict[ActionStyle, str] = {
    "line": "react",
    "plain_line": "react",
    "sql_block": "react_sql",
    "tool_call": "react_tool",
    "search_tags": "search_tags",
    "fenced": "fenced",
}


def format_for(row: EnvironmentRow, name: str = "auto") -> ActionFormat:
    """The format with this name; "auto" selects the environment's own format.

    Raises ValueError if the name is unknown or the environment's server cannot read the format.
    """
    if name == "auto":
        name = _OWN_FORM[row.action]
    chosen = FORMATS[name]
    if name == "raw" and row.sends_text:
        # The server parses its own format; "raw" only omits the check before sending.
        return dataclasses.replace(FORMATS[_OWN_FORM[row.action]], name="raw", find=chosen.find)
    if row.action not in chosen.styles:
        fitting = [other.name for other in FORMATS.values() if row.action in other.styles]
        raise ValueError(
            f"action format {name!r} does not fit {row.name}, whose actions are of style "
            f"{row.action!r}; write auto or one of {', '.join(fitting)}"
        )
    if chosen.with_tools is not None:
        prompt = PROMPTS.get(row.name)
        return chosen.with_tools((prompt and prompt.tools) or (ACT,))
    return chosen


def _shaped(action: str, style: ActionStyle) -> str:
    # An escape in JSON or code can produce a lone surrogate, which tokenizers reject.
    action = action.encode("utf-8", "replace").decode("utf-8")
    if style == "plain_line":
        action = re.sub(r"[^A-Za-z0-9, ]", "", " ".join(action.split()))
    elif style == "sql_block":
        action = _unfenced(action)
    return action.strip()


def _unfenced(text: str) -> str:
    """The stripped text, without its fence if it is a fenced block."""
    text = text.strip()
    if text.startswith("```"):
        first, _, rest = text.partition("\n")
        inside = first[3:] if "```" in first[3:] else rest
        text = inside.partition("```")[0].strip()
    return text


# Instruct models write **Action:** or **Action**: as well.
_MARK_UP = r"^[ \t]*(?:[*_#]{1,3}[ \t]*)?"
_ACTION_LINE = re.compile(_MARK_UP + r"Action[*_]{0,3}:[*_]{0,3}", re.MULTILINE)
_NEXT_PART = re.compile(_MARK_UP + r"(?:Thought|Observation)[*_]{0,3}:", re.MULTILINE)
_LIST_ITEM = re.compile(r"(?:[-*\u2022]|\d{1,3}[.)])[ \t]+(?=\S)")
_EMPHASIS = re.compile(r"(\*\*|__|`)(.+)\1")


def _find_react(text: str) -> str:
    marks = list(_ACTION_LINE.finditer(text)) or list(re.finditer(r"\bAction:", text))
    if not marks:
        raise NoAction('there is no "Action:". Write "Action:" and then one action.')
    if len(marks) > 1:
        raise NoAction(
            f'"Action:" occurs {len(marks)} times. Give only one action in every answer.'
        )
    rest = text[marks[0].end() :]
    end = _NEXT_PART.search(rest)
    marked_up = re.search("[*_#]", marks[0][0]) is not None
    return _only_action(_unfenced(rest[: end.start() if end else None]), marked_up)


def _only_action(text: str, marked_up: bool) -> str:
    """The first line, which may be emphasized or the only item of a list."""
    first, *others = [line.strip() for line in text.splitlines()[:50]] or [""]
    following = next((line for line in others if line), "")
    if (item := _LIST_ITEM.match(first)) is not None:
        if _LIST_ITEM.match(following):
            raise NoAction("there are several actions in a list. Give only one action.")
        first = first[item.end() :]
    emphasized = _EMPHASIS.fullmatch(first.strip())
    # A single word in backticks can be an action of its own.
    return emphasized[2] if emphasized and (marked_up or " " in emphasized[2]) else first


def _render_react(thought: str, action: str) -> str:
    return f"Thought:\n{thought}\n\nAction:\n{action}"


_add("react", "Action:", _render_react, _find_react, "line", "plain_line")


def _find_sql(text: str) -> str:
    _, fence, query = text.rpartition("```sql")
    if not fence:
        raise NoAction("there is no ```sql block. Write the query between ```sql and ```.")
    return query.partition("```")[0]


def _render_sql(thought: str, action: str) -> str:
    return _render_react(thought, f"```sql\n{_unfenced(action)}\n```")


_add("react_sql", "```sql", _render_sql, _find_sql, "sql_block")


def _tag_format(tag: str) -> ActionFormat:
    opening, closing = f"<{tag}>", f"</{tag}>"

    def find(answer: str) -> str:
        opened, closed = answer.count(opening), answer.count(closing)
        if not opened or not closed:
            missing = closing if opened else opening
            raise NoAction(f"there is no {missing}. Write one action as {opening}action{closing}.")
        if opened > 1 or closed > 1:
            raise NoAction(f"there are several {opening}. Give only one action in every answer.")
        return answer.partition(opening)[2].partition(closing)[0]

    return ActionFormat(
        tag,
        _INSTRUCTIONS["tag"].format(tag=tag),
        opening,
        lambda thought, action: f"<think>{thought}</think>\n{opening}{_unfenced(action)}{closing}",
        find,
    )


for _tag in ("act", "action", "response"):
    FORMATS.add(_tag_format(_tag))


def _find_function_call(text: str) -> str:
    start, end = text.find("{"), text.rfind("}")
    wanted = 'Write {"thought": ..., "function_name": "act", "arguments": {"action": ...}}.'
    if start < 0 or end < start:
        raise NoAction(f"there is no JSON object. {wanted}")
    try:
        call = parse_json(text[start : end + 1])
    except ToolCallError as error:
        raise NoAction(f"{error} {wanted}") from None
    if not isinstance(call, dict) or call.get("function_name") != "act":
        raise NoAction(f'"function_name" must be "act". {wanted}')
    arguments = call.get("arguments")
    action = arguments.get("action") if isinstance(arguments, dict) else None
    if not isinstance(action, str):
        raise NoAction(f'"arguments" must hold the text of the action. {wanted}')
    return action


def _render_function_call(thought: str, action: str) -> str:
    arguments = {"action": _unfenced(action)}
    call = {"thought": thought, "function_name": "act", "arguments": arguments}
    return json.dumps(call, ensure_ascii=False)


_add("function_call", '"function_name"', _render_function_call, _find_function_call)


def _find_code(text: str) -> str:
    wanted = 'Write one call act("...") between ```python and ```.'
    parts = text.split("```python")
    if len(parts) != 2:
        how_many = "no" if len(parts) == 1 else "more than one"
        raise NoAction(f"there is {how_many} ```python block. {wanted}")
    code = parts[1].partition("```")[0].strip()
    if len(code) > MAX_CODE:
        raise NoAction(f"the code is longer than {MAX_CODE} characters. {wanted}")
    check_nesting(code)
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoAction(f"the code cannot be read ({type(error).__name__}). {wanted}") from None
    match statements:
        case [ast.Expr(ast.Call(ast.Name("act"), args, keywords))]:
            pass
        case _:
            raise NoAction(f"the code must be one call of act. {wanted}")
    match [*args, *keywords]:
        case [ast.Constant(str(action)) | ast.keyword("action", ast.Constant(str(action)))]:
            return action
        case _:
            raise NoAction(f"act takes one text in quotes. {wanted}")


def _render_code(thought: str, action: str) -> str:
    comment = "\n".join(f"# {line}" for line in thought.splitlines())
    action = json.dumps(_unfenced(action), ensure_ascii=False)
    return f"```python\n{comment}\nact({action})\n```"


_add("code_as_action", "```python", _render_code, _find_code)


def _find_tool_input(text: str) -> str:
    if "with Action Input:" not in text:
        raise NoAction('write "Action: NAME with Action Input: {...}" as the last line.')
    return text


def _find_search_tags(text: str) -> str:
    if not any(f"</{tag}>" in text.partition(f"<{tag}>")[2] for tag in ("search", "answer")):
        raise NoAction("write <search>words</search> or <answer>a few words</answer>.")
    return text


def _find_fenced(text: str) -> str:
    if text.count("```") < 2:
        raise NoAction("write one action between triple backticks.")
    return text


_add(
    "react_tool",
    "with Action Input:",
    lambda thought, action: f"Thought: {thought}\n\nAction: {action}",
    _find_tool_input,
    "tool_call",
)
_add(
    "search_tags",
    "<search>",
    lambda thought, action: f"<think>{thought}</think>\n{action}",
    _find_search_tags,
    "search_tags",
)
_add("fenced", "```", lambda thought, action: f"{thought}\n{action}", _find_fenced, "fenced")
_add(
    "raw",
    "whole answer is taken as the action",
    lambda thought, action: action,
    lambda text: text,
    *get_args(ActionStyle),
)


def _tool_format(tools: Sequence[Tool]) -> ActionFormat:
    """Calls of these tools in the model's own syntax; exactly one in every turn."""
    by_name = {tool.name: tool for tool in tools}

    def find(text: str) -> str:
        _, calls = parse_tool_calls(text)
        if len(calls) != 1:
            raise NoAction(
                f"there are {len(calls)} tool calls, and none is carried out. Make exactly one in "
                "every answer."
                if calls
                else "there is no tool call. Call a tool."
            )
        if calls[0].name not in by_name:
            raise NoAction(f"there is no tool {calls[0].name[:80]!r}.")
        return by_name[calls[0].name].command(calls[0].arguments)

    def render(thought: str, action: str) -> str:
        for text in (_unfenced(action), action.strip()):
            for tool in tools:
                arguments = tool.arguments(text)
                if arguments is not None:
                    return f"{thought}\n{render_tool_call(ToolCall(tool.name, arguments))}".strip()
        return f"{thought}\n{action}"  # not an action of this environment

    signatures = "\n".join(tool.signature for tool in tools)
    return ActionFormat(
        "tool_call",
        _INSTRUCTIONS["tool_call"].format(tools=signatures),
        "exactly one tool",
        render,
        find,
        frozenset(get_args(ActionStyle)),
        tuple(tool.schema() for tool in tools),
        _tool_format,
    )


FORMATS.add(_tool_format((ACT,)))
