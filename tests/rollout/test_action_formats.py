"""Parsers read what their instructions ask for; other texts get an error message."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import ENVIRONMENTS, ActionStyle, environment
from manus_jax.rollout.action_formats import (
    FORMATS,
    ActionFormat,
    format_for,
    without_thoughts,
)
from manus_jax.rollout.runner import STACK_BYTES

FITTING = [
    (env, action_format.name)
    for env, row in ENVIRONMENTS.items()
    for action_format in FORMATS.values()
    if row.action in action_format.styles
]
PARSED = ("react", "act", "action", "response", "function_call", "code_as_action")


@pytest.mark.parametrize(("env", "name"), FITTING)
def test_the_examples_that_a_prompt_shows_are_parsed(env: str, name: str) -> None:
    row = environment(env)
    action_format = format_for(row, name)
    for example in PROMPTS[env].examples:
        turn = action_format.render(example.thought, example.action)
        wanted = without_thoughts(turn).strip() if row.sends_text else example.action
        if row.action == "sql_block":
            wanted = "SELECT COUNT(*) FROM item"
        elif action_format.tools:  # servers of tools evaluate a Python literal
            tool = row.action == "tool_call"
            wanted = f"Action: {example.action}".replace('"', "'") if tool else example.action
        assert action_format.parse(turn, row.action).action == wanted


@pytest.mark.bug("B10")
@pytest.mark.parametrize("name", PARSED)
def test_the_form_in_the_instruction_is_parsed(name: str) -> None:
    _, _, form = re.split(r"(form[^\n]*:\n\n)", FORMATS[name].instruction, maxsplit=1)
    assert FORMATS[name].parse(form, "line").action == "the action"


@pytest.mark.parametrize("name", ["react_sql", "react_tool", "search_tags", "fenced"])
def test_the_form_of_a_style_of_its_own_is_parsed(name: str) -> None:
    [style] = FORMATS[name].styles
    assert FORMATS[name].parse(FORMATS[name].instruction, style).valid


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_marker_is_shown_by_the_instruction(name: str) -> None:
    assert FORMATS[name].marker in FORMATS[name].instruction


LINE = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1).filter(
    lambda text: not re.search("```|<|Action:|Thought:|Observation:", text)
)


@settings(max_examples=60, deadline=None)
@given(LINE, LINE, st.sampled_from(PARSED))
def test_any_rendered_turn_gives_its_action_back(thought: str, action: str, name: str) -> None:
    assert FORMATS[name].parse(FORMATS[name].render(thought, action), "line").action == action


@settings(max_examples=150, deadline=None)
@given(st.text(), st.sampled_from(sorted(FORMATS)), st.sampled_from(["line", "plain_line"]))
def test_any_text_gives_an_action_or_a_reason(text: str, name: str, style) -> None:
    parsed = FORMATS[name].parse(text, style)
    assert parsed.valid == bool(parsed.action) != bool(parsed.error)
    assert parsed.valid or parsed.error.startswith("Invalid action: ")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought:\nup it is\n\nAction:\nmove up", "move up"),
        ("Thought: I go. Action: move up", "move up"),
        ("Action: move up\n\nObservation: You moved.\nThought: good", "move up"),
        ("  Action:\n\n\n   move up  \nand so on", "move up"),
        ("Action:\n```\nmove up\n```", "move up"),
        ("The Action: line below counts.\nAction: move up", "move up"),
        ("move up", None),
        ("Action:", None),
        ("Action:   \n \n", None),
        ("Action: move up\nAction: move up", None),
        ("Action: move up\n\nObservation: wall\n\nThought: then\n\nAction: move left", None),
        ("ReAction: move up", None),
        ("", None),
        # As instruct models write it: emphasis, headings, lists.
        ("**Thought:** up\n\n**Action:**\nmove up", "move up"),
        ("**Action:** move up", "move up"),
        ("**Action**: move up", "move up"),
        ("### Action: move up", "move up"),
        ("**Action:**\n**move up**", "move up"),
        ("Action: `move up`", "move up"),
        ("Action: **move up**", "move up"),
        ("**Action:**", None),
        ("**Action:** move up\n**Observation:** You moved.", "move up"),
        ("**Action:** move up\n**Action:** move left", None),
        ("Action:\n- move up", "move up"),
        ("Action:\n1. move up\n\nThis brings me closer.", "move up"),
        ("Action:\n1. move up\n2. move left", None),
        ("Action:\n- move up\n\n- move left", None),
    ],
)
def test_react(text: str, action: str | None) -> None:
    assert FORMATS["react"].parse(text, "line").action == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think>up</think>\n<act>move up</act>", "move up"),
        ("<act> move up\n</act> done", "move up"),
        ("<think>I write <act>x</act> or <act>y</act></think><act>move up</act>", "move up"),
        ("<act>move up", None),
        ("move up</act>", None),
        ("</act>move up<act>", None),
        ("<act></act>", None),
        ("<act>  </act>", None),
        ("<act>move up</act><act>move left</act>", None),
        ("<act><act>move up</act></act>", None),
        ("<action>move up</action>", None),
        ("<response>move up</response>", None),
        ("Action: move up", None),
    ],
)
def test_tags(text: str, action: str | None) -> None:
    assert FORMATS["act"].parse(text, "line").action == action


@pytest.mark.parametrize("name", PARSED)
def test_thoughts_are_removed_before_parsing(name: str) -> None:
    decoy = FORMATS[name].render("I might", "jump")
    turn = FORMATS[name].render("up", "move up")
    assert FORMATS[name].parse(f"<think>{decoy}</think>\n{turn}", "line").action == "move up"
    # The template may have opened the thought in the prompt.
    assert FORMATS[name].parse(f"{decoy}</think>\n{turn}", "line").action == "move up"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_unfinished_thought_is_not_an_action(name: str) -> None:
    style = next(iter(FORMATS[name].styles))
    turn = FORMATS[name].render("up", "move up").replace("</think>", "")
    parsed = FORMATS[name].parse(f"<think>{turn}", style)
    assert not parsed.valid and "</think>" in parsed.error


@pytest.mark.parametrize(
    ("name", "text", "style"),
    [
        ("react_sql", "Action:\n```sql\nDELETE FROM item", "sql_block"),
        ("code_as_action", "```python\nact('move up')", "line"),
        ("react", "Action:\n```\nmove", "line"),
        ("fenced", "first ```click [3]``` then ```click [4]", "fenced"),
    ],
)
def test_a_code_block_that_the_token_limit_cut_off_is_not_executed(
    name: str, text: str, style: ActionStyle
) -> None:
    assert FORMATS[name].parse(text, style).valid
    parsed = FORMATS[name].parse(text, style, cut=True)
    assert not parsed.valid and "cut off" in parsed.error
    assert FORMATS[name].parse(text + "\n```", style, cut=True).valid


@pytest.mark.parametrize("name", [*PARSED, "react_sql", "react_tool", "tool_call"])
def test_an_error_repeats_the_expected_form(name: str) -> None:
    style = next(iter(FORMATS[name].styles))
    parsed = FORMATS[name].parse("I do not know.", style)
    form = FORMATS[name].instruction.split(":\n\n")[-1]
    assert parsed.error.endswith(form)


def call(**fields: object) -> str:
    whole = {"thought": "up", "function_name": "act", "arguments": {"action": "move up"}}
    return json.dumps(whole | fields)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (call(), "move up"),
        (f"Sure:\n```json\n{call()}\n```", "move up"),
        (call(thought="brackets ([{ in a thought"), "move up"),
        (call(function_name="move"), None),
        (call(arguments="move up"), None),
        (call(arguments={"direction": "up"}), None),
        (call(arguments={"action": 3}), None),
        (call() + call(), None),
        ("{'thought': 'single quotes'}", None),
        ("[1, 2]", None),
        ('{"a": ' * 900 + "1" + "}" * 900, None),
        ('{"arguments": ' + "9" * 5000 + "}", None),
        ("no JSON", None),
        ("} {", None),
    ],
)
def test_function_call(text: str, action: str | None) -> None:
    assert FORMATS["function_call"].parse(text, "line").action == action


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (block("# up\nact('move up')"), "move up"),
        (block("act(action='move up')"), "move up"),
        (block('act("move" " up")'), "move up"),
        (block("act('it''s')\n# done"), "its"),
        (block("print('x')"), None),
        (block("act('a'); act('b')"), None),
        (block("act(open('/etc/passwd').read())"), None),
        (block("act(f'{1 + 1}')"), None),
        (block("act(3)"), None),
        (block("act()"), None),
        (block("act('a', 'b')"), None),
        (block("act(*['a'])"), None),
        (block("act(**{'action': 'a'})"), None),
        (block("act(action='a', to='b')"), None),
        (block("x = act('a')"), None),
        (block("import os"), None),
        (block("act('a'"), None),
        (block("# only a thought"), None),
        (block("act('a')\0"), None),
        (block("act('a')") + block("act('b')"), None),
        ("act('move up')", None),
    ],
)
def test_code_as_action_is_read_and_never_run(text: str, action: str | None) -> None:
    assert FORMATS["code_as_action"].parse(text, "line").action == action


def test_a_plain_line_keeps_nothing_but_letters_digits_commas_and_spaces() -> None:
    text = "Action: craft 4 oak_planks, using (1) 'oak logs'!"
    assert (
        FORMATS["react"].parse(text, "plain_line").action == "craft 4 oakplanks, using 1 oak logs"
    )
    assert not FORMATS["react"].parse("Action: ?!", "plain_line").valid
    tagged = "<act>\nget 1\n oak logs</act>"
    assert FORMATS["act"].parse(tagged, "plain_line").action == "get 1 oak logs"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("react_sql", "Thought: x\n\nAction:\n```sql\nSELECT 1\n```"),
        ("react_sql", "```sql SELECT 2``` no: ```sql\nSELECT 1"),
        ("act", "<act>SELECT 1</act>"),
        ("act", "<act>```sql\nSELECT 1\n```</act>"),
        ("code_as_action", block('act("SELECT 1")')),
    ],
)
def test_sql_comes_without_its_fence(name: str, text: str) -> None:
    assert FORMATS[name].parse(text, "sql_block").action == "SELECT 1"


def test_half_a_character_in_an_escape_does_not_get_through() -> None:
    text = '{"function_name": "act", "arguments": {"action": "x\\ud800y"}}'
    parsed = FORMATS["function_call"].parse(text, "line")
    assert parsed.action == "x?y"


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize(
    "unit",
    ["Action:", "<act>", "</act>", "<think>", "{", "[", "```python\n", "```", " ", "\n", "a", '{"'],
)
def test_huge_texts_are_read_in_one_pass(name: str, unit: str) -> None:
    style = next(iter(FORMATS[name].styles))
    FORMATS[name].parse(unit * (400_000 // len(unit)), style)


@pytest.mark.slow
def test_nested_code_and_json_do_not_overflow_the_small_stack_of_an_episode() -> None:
    script = f"""
import threading
from manus_jax.rollout.action_formats import FORMATS
units = ("(", "[", "-", "not ", "lambda:", "1**", "1 if 1 else ", "a.", "a(", "1+", "await ", "{{")
def read():
    for unit in units:
        for size in (100, 1000, 3900 // len(unit), 100_000):
            for end in ("1", "1" + ")" * size, ""):
                code = "```python\\nact(" + unit * size + end + "\\n```"
                assert not FORMATS["code_as_action"].parse(code, "line").valid
    for opening in ("[", '{{"a":', "(" ):
        for size in (100, 1000, 100_000):
            FORMATS["function_call"].parse('{{"a":' + opening * size + "}}", "line")
    print("read")
threading.stack_size({STACK_BYTES})
thread = threading.Thread(target=read)
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "read"), done.stderr


def test_auto_is_the_environments_own_form() -> None:
    chosen = {env: format_for(row).name for env, row in ENVIRONMENTS.items()}
    assert chosen["textcraft"] == chosen["maze"] == "react"
    assert chosen["sqlgym"] == "react_sql"
    assert chosen["weather"] == "react_tool"
    assert chosen["searchqa"] == "search_tags"
    assert chosen["webarena"] == "fenced"


def test_raw_sends_the_whole_text_and_describes_the_servers_format() -> None:
    raw = format_for(environment("weather"), "raw")
    assert raw.parse("whatever", "tool_call").action == "whatever"
    assert raw.instruction == FORMATS["react_tool"].instruction
    assert format_for(environment("maze"), "raw").parse(" move up\n", "line").action == "move up"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("react_tool", "Action: get_weather"),
        ("search_tags", "<search>no end"),
        ("search_tags", "</search><search>"),
        ("fenced", "```click [3]"),
    ],
)
def test_text_that_a_server_could_not_read_is_not_sent(name: str, text: str) -> None:
    [style] = FORMATS[name].styles
    assert not FORMATS[name].parse(text, style).valid


def test_errors_for_unknown_and_unsuitable_formats_list_the_suitable_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown action format 'xml' \(known: auto, react, "):
        format_for(environment("maze"), "xml")
    with pytest.raises(
        ValueError, match=r"'act' does not fit weather.*write auto or one of react_tool"
    ):
        format_for(environment("weather"), "act")


def test_a_new_format_is_one_registration() -> None:
    loud = ActionFormat("loud", "Shout.", "!", lambda _, action: action.upper(), str.lower)
    with FORMATS.restored():
        FORMATS.add(loud)
        assert format_for(environment("maze"), "loud") is loud
        with pytest.raises(ValueError, match="the action format 'loud' is already registered"):
            FORMATS.add(loud)
        with pytest.raises(ValueError, match="the action format 'auto' is already registered"):
            FORMATS.add(dataclasses.replace(loud, name="auto"))
