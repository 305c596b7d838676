"""ALFWorld's games as data: the facts, the goal and the task of a PDDL problem.

The data set's `game.tw-pddl` files are JSON with a `pddl_problem`, whose domain is always the same
(`world.py` implements it), and a `grammar`, of which only the task's text differs between games.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from envs.game import GameError

Fact = tuple[str, ...]
"""A predicate and the ids of what it is about, in lower case."""

_TOKEN = re.compile(r"[()]|[^\s()]+")
_TASK = re.compile(r"Your task is to: ([^\"]*?)\.?\"")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A game: what holds at the start, what has to hold at the end, and the task in words.

    `types` maps every id to its type (agent, location, receptacle, object, rtype, otype), in the
    order of the file. `goal` is a formula of nested lists, such as ["and", ["isclean", "?o"]].
    """

    name: str
    task: str
    types: dict[str, str]
    facts: frozenset[Fact]
    goal: list[Any]


def parse_problem(name: str, task: str, pddl: str) -> Problem:
    """Reads a PDDL problem; GameError if it is not one."""
    text = re.sub(r";[^\n]*", "", pddl).lower().strip()  # PDDL does not distinguish case
    try:
        expression = _nested(iter(_TOKEN.findall(text.removeprefix("("))))
        sections = {part[0]: part[1:] for part in expression if isinstance(part, list)}
        facts = frozenset(
            tuple(fact)
            for fact in sections[":init"]
            if fact[0] != "=" and all(isinstance(word, str) for word in fact)
        )
        return Problem(name, task, typed(sections[":objects"]), facts, sections[":goal"][0])
    except (KeyError, IndexError, AttributeError, TypeError, StopIteration) as error:
        raise GameError(f"{name} is not a PDDL problem: {type(error).__name__} {error}") from None


def read_game(path: Path, name: str) -> Problem:
    """Reads a `game.tw-pddl` file; GameError if it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        task = _TASK.search(data["grammar"])
        if task is None:
            raise GameError(f"{path}: the grammar contains no task")
        return parse_problem(name, task[1], data["pddl_problem"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GameError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def _nested(tokens: Any) -> list[Any]:
    """The tokens up to the closing parenthesis, with nested lists for parentheses."""
    found: list[Any] = []
    for token in tokens:
        if token == ")":
            return found
        found.append(_nested(tokens) if token == "(" else token)
    return found


def typed(words: list[str]) -> dict[str, str]:
    """`a b - kind c - other` as {"a": "kind", "b": "kind", "c": "other"}."""
    types: dict[str, str] = {}
    names: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "-":
            kind = next(rest)
            types |= dict.fromkeys(names, kind)
            names = []
        else:
            names.append(word)
    return types
