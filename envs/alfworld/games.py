"""The games by item: those of ALFWorld's data set, or rooms generated from `household.toml`.

Where ALFWORLD_DATA names the directory with the data set (as the package alfworld expects it, with
`json_2.1.1/train`, `valid_seen` and `valid_unseen`), items are its solvable games in the order of
their paths or, if AgentGym's lists `mappings_train.json` and `mappings_test.json` are in that
directory as well, the games and splits of these lists. Otherwise there are 500 generated games of
the same six task types. A generated game depends on its item only, on every machine and in every
Python version.
"""

import functools
import json
import os
import random
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from envs.alfworld.problem import Fact, Problem, read_game
from envs.game import GameError

DATA_VARIABLE = "ALFWORLD_DATA"
TRAIN, TEST = range(400), range(400, 500)
_HELD_OUT = ("valid_seen", "valid_unseen")
_HOUSEHOLD: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("household.toml").read_text(encoding="utf-8")
)
_APPLIANCE_TASKS = {
    "pick_clean_then_place_in_recep": ("cleanable", "isclean", "sinkbasin"),
    "pick_heat_then_place_in_recep": ("heatable", "ishot", "microwave"),
    "pick_cool_then_place_in_recep": ("coolable", "iscool", "fridge"),
}
_LIGHT = "look_at_obj_in_light"
_TWO = "pick_two_obj_and_place"
T = TypeVar("T")


def data_directory() -> Path | None:
    """The directory of the data set, if ALFWORLD_DATA is set."""
    given = os.environ.get(DATA_VARIABLE)
    return Path(given) if given else None


def missing() -> str | None:
    """What is wrong with ALFWORLD_DATA, in one sentence."""
    directory = data_directory()
    try:
        if directory is None or _files(directory)["train"]:
            return None
    except GameError as error:
        return str(error)
    return (
        f"{DATA_VARIABLE} is set, but {directory}/json_2.1.1/train has no solvable game.tw-pddl "
        "files; run alfworld-download, or unset the variable to play generated games"
    )


def items(split: str) -> Sequence[int]:
    """The items of "train" or "test"."""
    if split not in ("train", "test"):
        raise GameError(f"unknown split {split!r}; there are: train, test")
    directory = data_directory()
    if directory is None:
        return TRAIN if split == "train" else TEST
    return [*_files(directory)[split]]


def number_of_items() -> int:
    return max([-1, *items("train"), *items("test")]) + 1


@functools.lru_cache(maxsize=512)
def problem(item: int) -> Problem:
    """The game of an item; GameError if there is none."""
    directory = data_directory()
    if directory is None:
        if not 0 <= item < number_of_items():
            raise GameError(f"there is no game {item}; games are 0 to {number_of_items() - 1}")
        return _generate(item)
    files = _files(directory)
    path = files["train"].get(item) or files["test"].get(item)
    if path is None:
        raise GameError(f"{directory} has no game {item}, of 0 to {number_of_items() - 1}")
    return read_game(path, "/".join(path.parts[-3:-1]))


@functools.cache
def _files(directory: Path) -> dict[str, dict[int, Path]]:
    """The files of the games: split → item → file."""
    data = directory / "json_2.1.1"
    lists = {split: directory / f"mappings_{split}.json" for split in ("train", "test")}
    if all(file.exists() for file in lists.values()):
        # AgentGym's test games are in the split of the data set that repeats training scenes.
        train = _listed(lists["train"], data / "train")
        test = _listed(lists["test"], data / "valid_train")
    else:
        train, test = _found(data / "train"), [p for x in _HELD_OUT for p in _found(data / x)]
    files = {n: path for n, path in enumerate([*train, *test]) if path.is_file()}
    return {
        "train": {n: path for n, path in files.items() if n < len(train)},
        "test": {n: path for n, path in files.items() if n >= len(train)},
    }


def _found(directory: Path) -> list[Path]:
    """The games in a directory that can be won."""
    # ALFWorld plays neither movable receptacles nor sliced things.
    paths = sorted(directory.glob("*/*/game.tw-pddl"))
    played = [p for p in paths if not any(x in str(p) for x in ("movable", "Sliced"))]
    return [p for p in played if _solvable(p)]


def _listed(file: Path, directory: Path) -> list[Path]:
    """The games of one of AgentGym's lists, in its order."""
    try:
        games = json.loads(file.read_text(encoding="utf-8"))
        return [directory / x["task_type"] / x["task_id"] / "game.tw-pddl" for x in games]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GameError(f"{file} is not one of AgentGym's lists: {type(error).__name__}") from None


def _solvable(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("solvable"))
    except (OSError, ValueError, AttributeError):
        return False


class _Choices:
    """Random choices with the one method of the generator that is stable across versions."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def below(self, count: int) -> int:
        return int(self._random() * count)

    def of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]


def _generate(item: int) -> Problem:
    """A room, a task that is possible in it, and things in their places."""
    for attempt in range(1000):
        choose = _Choices(f"alfworld {item} {attempt}")
        task_type = list(_HOUSEHOLD["tasks"])[item % len(_HOUSEHOLD["tasks"])]
        room = choose.of(_rooms(task_type))
        furniture = [
            kind
            for kind, (least, most) in _HOUSEHOLD["rooms"][room].items()
            for _ in range(least + choose.below(most - least + 1))
        ]
        goals = _goals(task_type, room, furniture)
        if goals:
            return _furnish(item, task_type, choose.of(goals), room, furniture, choose)
    raise AssertionError(f"no room for game {item}")


def _rooms(task_type: str) -> list[str]:
    if task_type == _LIGHT:
        return ["livingroom", "bedroom"]
    if task_type not in _APPLIANCE_TASKS:
        return list(_HOUSEHOLD["rooms"])
    appliance = _APPLIANCE_TASKS[task_type][2]
    return [room for room, kinds in _HOUSEHOLD["rooms"].items() if appliance in kinds]


def _goals(task_type: str, room: str, furniture: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of a thing and a place (or lamp) that the task can be about."""
    contains, things = _HOUSEHOLD["contains"], _HOUSEHOLD["things"][room]
    if task_type == _LIGHT:
        lamp = "floorlamp" if room == "livingroom" else "desklamp"
        return [(thing, lamp) for thing in things]
    if task_type in _APPLIANCE_TASKS:
        ability, _, appliance = _APPLIANCE_TASKS[task_type]
        if appliance not in furniture:
            return []
        things = [thing for thing in things if thing in _HOUSEHOLD[ability]]
    kinds = sorted(set(furniture))
    return [
        (thing, place)
        for thing in things
        for place in kinds
        if thing in contains[place]
        # It must also have another place, where it is at first.
        and any(thing in contains[other] for other in kinds if other != place)
    ]


def _furnish(
    item: int,
    task_type: str,
    goal: tuple[str, str],
    room: str,
    furniture: Sequence[str],
    choose: _Choices,
) -> Problem:
    """The facts of a game in the form of the data set's problems."""
    thing, place = goal
    contains = _HOUSEHOLD["contains"]
    types = {"agent1": "agent", "start": "location"}
    facts: set[Fact] = {("atlocation", "agent1", "start")}
    receptacles: list[tuple[str, str]] = []
    for number, kind in enumerate(furniture):
        base = kind.removesuffix("basin")
        name = f"{base}_bar_{number:02d}" + ("_bar_" + kind if base != kind else "")
        types |= {name: "receptacle", f"loc_{number}": "location", f"{kind}type": "rtype"}
        facts |= {("receptacleatlocation", name, f"loc_{number}")}
        facts |= {("receptacletype", name, f"{kind}type")}
        facts |= {("cancontain", f"{kind}type", f"{x}type") for x in contains[kind]}
        if kind in _HOUSEHOLD["openable"]:
            facts.add(("openable", name))
        receptacles.append((name, kind))

    def add(kind: str, options: list[tuple[str, str]]) -> None:
        receptacle = choose.of(options)[0]
        number = sum(1 for x in types.values() if x == "object")
        name = f"{kind}_bar_{number:02d}"
        types.update({name: "object", f"{kind}type": "otype"})
        location = next(f[2] for f in facts if f[:2] == ("receptacleatlocation", receptacle))
        facts.update({("objecttype", name, f"{kind}type"), ("inreceptacle", name, receptacle)})
        facts.add(("objectatlocation", name, location))
        lamp = kind in _HOUSEHOLD["lamps"]
        facts.update({("toggleable" if lamp else "pickupable", name)})
        for ability in ("cleanable", "heatable", "coolable", "sliceable"):
            if kind in _HOUSEHOLD[ability]:
                facts.add((ability, name))

    for _ in range(2 if task_type == _TWO else 1 + choose.below(2)):
        add(thing, [r for r in receptacles if thing in contains[r[1]] and r[1] != place])
    if task_type == _LIGHT:
        add(place, [r for r in receptacles if r[1] in ("desk", "dresser", "sidetable")])
    for other in _HOUSEHOLD["things"][room]:
        options = [r for r in receptacles if other in contains[r[1]]]
        for _ in range(choose.below(3) if other != thing and options else 0):
            add(other, options)
    task = choose.of(_HOUSEHOLD["tasks"][task_type]).format(thing=thing, place=place)
    light = task_type == _LIGHT
    name = f"{task_type}-{thing}-None-{'None' if light else place}-{item}/generated"
    return Problem(name, task, types, frozenset(facts), _formula(task_type, thing, place))


def _formula(task_type: str, thing: str, place: str) -> list[Any]:
    """What has to hold at the end, in PDDL, as in the data set."""
    if task_type == _LIGHT:
        lamp = [
            ["objecttype", "?ot", f"{place}type"],
            ["toggleable", "?ot"],
            ["istoggled", "?ot"],
            ["receptacleatlocation", "?r", "?l"],
            ["atlocation", "?a", "?l"],
            ["inreceptacle", "?ot", "?r"],
        ]
        held = ["and", ["objecttype", "?o", f"{thing}type"], ["holds", "?a", "?o"]]
        variables = _words("?ot - object ?r - receptacle ?a - agent ?l - location")
        return [
            "and",
            ["exists", variables, ["and", *lamp]],
            ["exists", _words("?o - object ?a - agent"), held],
        ]

    def placed(variable: str) -> list[Any]:
        return [
            ["objecttype", variable, f"{thing}type"],
            ["receptacletype", "?r", f"{place}type"],
            ["inreceptacle", variable, "?r"],
        ]

    conditions = placed("?o")
    if task_type == _TWO:
        second = ["and", ["not", ["=", "?o", "?o2"]], *placed("?o2")]
        conditions.append(["exists", ["?o2", "-", "object"], second])
    elif task_type in _APPLIANCE_TASKS:
        ability, state, _ = _APPLIANCE_TASKS[task_type]
        conditions += [[ability, "?o"], [state, "?o"]]
    return ["exists", _words("?r - receptacle ?o - object"), ["and", *conditions]]


def _words(text: str) -> list[str]:
    return text.split()
