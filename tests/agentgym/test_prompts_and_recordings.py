"""The prompts list the actions that AgentGym's servers accepted when they were recorded."""

import json
import re

import pytest
from scripted_servers import TRANSCRIPTS

from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import ENVIRONMENTS
from manus_jax.rollout.action_formats import format_for

NAMES = sorted(path.stem for path in TRANSCRIPTS.iterdir())
REFUSED = re.compile(
    r"Nothing happens|not recognized|No known action matches|Could not execute|Format error|"
    r"ERROR \||invalid word|syntax error|^The action is not"
)


def steps(name: str) -> list[tuple[str, str]]:
    """The recorded actions and the observations that answered them."""
    row, found = ENVIRONMENTS[name], []
    for line in (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        action = (entry["request"]["body"] or {}).get("action")
        answer = json.loads(entry["response_text"]) if entry["status"] == 200 else {}
        if action is not None and row.view_field in answer:
            found.append((action, answer[row.view_field]))
    return found


def listed(name: str) -> list[re.Pattern[str]]:
    """What the prompt lists, with a pattern for every placeholder."""
    row, patterns = ENVIRONMENTS[name], []
    if row.action == "tool_call":
        lines = [re.sub(r"\([^)]*\)", "", line).partition(":")[0] for line in PROMPTS[name].actions]
        tools = [tool.strip() for line in lines for tool in line.split(",")]
        return [re.compile(rf".*Action: {tool} with Action Input: .*", re.S) for tool in tools]
    for line in PROMPTS[name].actions:
        for part in re.split(r", (?![^\[<]*[\]>])", re.split(r":(?= )", line)[0]):
            if part.startswith("["):
                continue  # the rest of a list
            pattern = re.escape(part.strip())
            pattern = re.sub(r"\\\[[^]]*\\\]", r"\\[?.+\\]?", pattern)
            pattern = re.sub(r"(<\w+>).*(</\w+>)", r".*\1.*\2", pattern)
            patterns.append(re.compile(pattern, re.S))
    return patterns


def is_listed(name: str, action: str) -> bool:
    if ENVIRONMENTS[name].action == "sql_block":
        return True  # any query
    if name == "wordle":
        return bool(re.fullmatch(r"[a-z]( [a-z]){4}", action))
    return any(pattern.fullmatch(action) for pattern in listed(name))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sheet"])
def test_every_action_that_a_server_accepted_is_listed(name: str) -> None:
    accepted = [action for action, seen in steps(name) if not REFUSED.search(seen)]
    assert accepted
    if name == "wordle":
        accepted.remove("solar")  # letters without spaces work too
    assert [action for action in accepted if not is_listed(name, action)] == []


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("alfworld", "move alarmclock 1 to desk 1"),
        ("babyai", "fly"),
        ("sciworld", "fly"),
        ("textcraft", "dance"),
        ("weather", "hello"),
    ],
)
def test_an_action_that_a_server_refused_is_not_listed(name: str, action: str) -> None:
    [seen] = [seen for sent, seen in steps(name) if sent == action]
    assert REFUSED.search(seen)
    assert not is_listed(name, action)


def test_every_action_that_alfworld_offers_is_listed_and_nothing_else() -> None:
    offered = set()
    for line in (TRANSCRIPTS / "alfworld.jsonl").read_text().splitlines():
        answer = json.loads(json.loads(line)["response_text"])
        if isinstance(answer, dict):
            offered |= set(answer.get("available_actions", ()))
    assert len(offered) > 20
    assert [action for action in offered if not is_listed("alfworld", action)] == []
    # These need a task, a lamp or a dirty thing that the recorded games do not have.
    unseen = ("clean", "heat", "cool", "use")
    for pattern in listed("alfworld"):
        if not pattern.pattern.startswith(unseen):
            assert any(pattern.fullmatch(action) for action in offered), pattern.pattern


def test_every_action_that_babyai_offers_is_listed() -> None:
    lists = [seen.partition("Available actions: ")[2] for _, seen in steps("babyai")]
    offered = {action for text in lists for action in re.findall('"([^"]+)"', text)}
    assert "pickup yellow key 1" in offered
    assert [action for action in offered if not is_listed("babyai", action)] == []
    assert "box" not in " ".join(line for line in PROMPTS["babyai"].actions if "toggle" in line)


def test_every_verb_of_sciworld_is_one_that_its_server_names() -> None:
    for line in (TRANSCRIPTS / "sciworld.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["request"]["path"].startswith("/action_hint"):
            hints = json.loads(entry["response_text"])["possible_actions"]
    for pattern in listed("sciworld"):
        words = pattern.pattern.split("\\ ")[0]
        assert any(hint.split()[0] == words for hint in hints), pattern.pattern


@pytest.mark.parametrize("name", ["weather", "movie", "todo"])
def test_exactly_the_tools_that_a_server_names_are_listed(name: str) -> None:
    answers = (TRANSCRIPTS / f"{name}.jsonl").read_text()
    listing = answers[answers.index("following valid actions") :].partition("]")[0]
    tools = set(re.findall(r"'(\w+)'", listing))
    assert {pattern.pattern.split()[1] for pattern in listed(name)} == tools


def test_tool_calls_are_asked_for_as_python_dictionaries() -> None:
    """The server evaluates a Python literal: `true` was refused where `True` was read."""
    inputs = {
        action.rpartition(": ")[2]: seen for action, seen in steps("todo") if "1020" in action
    }
    [refused, read] = inputs.values()
    assert REFUSED.search(refused) and not REFUSED.search(read)
    assert "True, False and None" in format_for(ENVIRONMENTS["todo"]).instruction


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("sheet", "sqlgym")])
def test_replies_that_refuse_an_action_are_known_by_how_they_start(name: str) -> None:
    """sqlgym answers a query that it cannot run with SQLite's own message, which has no form."""
    rejections = ENVIRONMENTS[name].rejections
    for action, seen in steps(name):
        assert seen.startswith(rejections) == bool(REFUSED.search(seen) or "Could not" in seen), (
            action,
            seen,
        )
