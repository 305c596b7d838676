"""The rules of ALFWorld: what a command changes, what it shows, and when the task is done.

This implements the PDDL domain and the text grammar of the package alfworld without its planner,
which takes seconds for a reset and tenths of a second for a step. Commands follow alfworld 0.3.3,
which AgentGym serves: `put X in/on Y`, where later versions have `move X to Y`.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from envs.alfworld.problem import Fact, Problem, typed

_PUNCTUATION = {"_bar_": "|", "_minus_": "-", "_plus_": "+", "_dot_": ".", "_comma_": ","}
_STATES = (  # of an object that is examined; the first that holds is named
    (("isclean", "ishot", "issliced"), "a hot and clean sliced"),
    (("isclean", "iscool", "issliced"), "a cool and clean sliced"),
    (("isclean", "issliced"), "a clean sliced"),
    (("ishot", "issliced"), "a hot sliced"),
    (("iscool", "issliced"), "a cool sliced"),
    (("isclean", "ishot"), "a hot and clean"),
    (("isclean", "iscool"), "a cool and clean"),
    (("ishot",), "a hot"),
    (("isclean",), "a clean"),
    (("iscool",), "a cold"),
)
_APPLIANCES = {  # verb: what an object must be, the appliance, facts that come and go
    "clean": ("cleanable", "sinkbasintype", "isclean", None),
    "heat": ("heatable", "microwavetype", "ishot", "iscool"),
    "cool": ("coolable", "fridgetype", "iscool", "ishot"),
}
NOTHING_HAPPENS = "Nothing happens."


class World:
    """A game in progress."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.facts: set[Fact] = set(problem.facts)
        self.names = readable_names(problem.types)
        self.receptacles = self._of_type("receptacle")
        self.places = {r: place for _, r, place in self._static("receptacleatlocation")}
        kinds = [*self._static("objecttype"), *self._static("receptacletype")]
        self._kinds = {x: kind for _, x, kind in kinds}
        # The data set also declares the names of all kinds of things as objects.
        self.objects = [x for x in self._of_type("object") if x in self._kinds]
        (self._agent,) = self._of_type("agent")
        self.location = next(place for _, _, place in self._static("atlocation"))
        self.held: str | None = next((o for _, _, o in self._static("holds")), None)
        """The object that the agent carries."""

    def start(self) -> str:
        """The first observation."""
        seen = _listed([f"a {self.names[r]}" for r in self.receptacles])
        return (
            f"You are in the middle of a room. Looking quickly around you, you see {seen}.\n"
            f"Your task is to: {self.problem.task}."
        )

    @property
    def here(self) -> list[str]:
        """The receptacles at the agent's location."""
        return [r for r in self.receptacles if self.places[r] == self.location]

    def kind(self, x: str) -> str:
        return self._kinds[x]

    def contains(self, receptacle: str) -> list[str]:
        return [o for o in self.objects if ("inreceptacle", o, receptacle) in self.facts]

    def accessible(self, receptacle: str) -> bool:
        """Whether things can be taken from it and put into it."""
        return not self.has("openable", receptacle) or self.has("opened", receptacle)

    def has(self, *fact: str) -> bool:
        return fact in self.facts

    def won(self) -> bool:
        return self._holds(self.problem.goal, {})

    def commands(self) -> dict[str, Callable[[], str]]:
        """All commands that have an effect now, with the function that carries each out."""
        return dict(sorted(self._possible()))

    def step(self, command: str) -> str:
        """Carries out a command; returns what it shows."""
        action = dict(self._possible()).get(command.strip())
        return NOTHING_HAPPENS if action is None else action()

    def _possible(self) -> Iterator[tuple[str, Callable[[], str]]]:
        names, held, here = self.names, self.held, self.here
        yield "look", self._look
        yield "inventory", self._inventory
        for r in self.receptacles:
            if self.places[r] != self.location:
                yield f"go to {names[r]}", functools.partial(self._go, r)
        if held is not None:  # other things cannot be examined
            yield f"examine {names[held]}", functools.partial(self._examine, held)
        for r in here:
            yield f"examine {names[r]}", functools.partial(self._describe, r)
            if self.has("openable", r):
                verb = "close" if self.has("opened", r) else "open"
                yield f"{verb} {names[r]}", functools.partial(self._turn, verb, r)
            for o in self.contains(r):
                if self.accessible(r) and held is None and self.has("pickupable", o):
                    yield f"take {names[o]} from {names[r]}", functools.partial(self._take, o, r)
                if self.has("toggleable", o):
                    yield f"use {names[o]}", functools.partial(self._use, o)
            if held is not None:
                yield from self._with_held(held, r)
        if held is not None and self.kind(held) in ("knifetype", "butterknifetype"):
            for o in self.objects:
                if self.has("sliceable", o) and self.has("objectatlocation", o, self.location):
                    yield (
                        f"slice {names[o]} with {names[held]}",
                        functools.partial(self._slice, o, held),
                    )

    def _with_held(self, held: str, r: str) -> Iterator[tuple[str, Callable[[], str]]]:
        names = self.names
        if self.accessible(r) and self.has("cancontain", self.kind(r), self.kind(held)):
            yield f"put {names[held]} in/on {names[r]}", functools.partial(self._put, held, r)
        for verb, (ability, appliance, becomes, ends) in _APPLIANCES.items():
            if self.has(ability, held) and self.kind(r) == appliance:
                yield (
                    f"{verb} {names[held]} with {names[r]}",
                    functools.partial(self._change, verb, held, r, becomes, ends),
                )

    def _look(self) -> str:
        here, location = self.here, self.location
        if not here:
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        beside = [
            f"a {self.names[o]}"
            for r in here
            for o in self.objects
            if self.has("objectatlocation", o, location) and not self.has("inreceptacle", o, r)
        ]
        facing = _listed([self.names[r] for r in here])
        return f"You are facing the {facing}. Next to it, you see {_listed(beside)}."

    def _inventory(self) -> str:
        if self.held is None:
            return "You are not carrying anything."
        return f"You are carrying: a {self.names[self.held]}."

    def _go(self, r: str) -> str:
        self.facts.discard(("atlocation", self._agent, self.location))
        self.location = self.places[r]
        self.facts.add(("atlocation", self._agent, self.location))
        return f"You arrive at {self.names[r]}. {self._describe(r)}"

    def _describe(self, r: str) -> str:
        name = self.names[r]
        if not self.accessible(r):
            return f"The {name} is closed."
        seen = _listed([f"a {self.names[o]}" for o in self.contains(r)])
        if self.has("openable", r):
            return f"The {name} is open. In it, you see {seen}."
        return f"On the {name}, you see {seen}."

    def _turn(self, verb: str, r: str) -> str:
        if verb == "close":
            self.facts.discard(("opened", r))
            return f"You close the {self.names[r]}."
        self.facts.add(("opened", r))
        return f"You open the {self.names[r]}. {self._describe(r)}"

    def _take(self, o: str, r: str) -> str:
        self.facts -= {("inreceptacle", o, r), ("objectatlocation", o, self.location)}
        self.facts |= {("holds", self._agent, o), ("holdsany", self._agent)}
        self.held = o
        return f"You pick up the {self.names[o]} from the {self.names[r]}."

    def _put(self, o: str, r: str) -> str:
        self.facts -= {("holds", self._agent, o), ("holdsany", self._agent)}
        self.held = None
        self.facts |= {("inreceptacle", o, r), ("objectatlocation", o, self.location)}
        return f"You put the {self.names[o]} in/on the {self.names[r]}."

    def _change(self, verb: str, o: str, r: str, becomes: str, ends: str | None) -> str:
        self.facts.add((becomes, o))
        if ends is not None:
            self.facts.discard((ends, o))
        return f"You {verb} the {self.names[o]} using the {self.names[r]}."

    def _use(self, o: str) -> str:
        self.facts ^= {("ison", o)}
        self.facts.add(("istoggled", o))
        return f"You turn on the {self.names[o]}."

    def _slice(self, o: str, knife: str) -> str:
        self.facts.add(("issliced", o))
        return f"You sliced the {self.names[o]} with the {self.names[knife]}."

    def _examine(self, o: str) -> str:
        name = self.names[o]
        if self.has("isreceptacleobject", o):
            inside = [x for x in self.objects if self.has("inreceptacleobject", x, o)]
            seen = _listed([f"a {self.names[x]}" for x in inside])
            return f"This is a normal {name}. In it, you see {seen}."
        for states, words in _STATES:
            if all(self.has(state, o) for state in states):
                return f"This is {words} {name}."
        if self.has("toggleable", o):
            return f"This {name} is {'on' if self.has('istoggled', o) else 'off'}."
        if self.has("sliceable", o) and self.has("issliced", o):
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    def _of_type(self, kind: str) -> list[str]:
        """Ids of a type, in the order in which observations list them."""
        return sorted(x for x, its_type in self.problem.types.items() if its_type == kind)

    def _static(self, predicate: str) -> list[Fact]:
        return [fact for fact in self.facts if fact[0] == predicate]

    def _holds(self, formula: list[Any], bound: Mapping[str, str]) -> bool:
        """Whether a PDDL formula is true, with values for its variables."""
        operator, *arguments = formula
        if operator == "and":
            return all(self._holds(part, bound) for part in arguments)
        if operator == "or":
            return any(self._holds(part, bound) for part in arguments)
        if operator == "not":
            return not self._holds(arguments[0], bound)
        if operator == "exists":
            body = arguments[1]
            parts = body[1:] if body[0] == "and" else [body]
            return self._exists(list(typed(arguments[0]).items()), parts, bound)
        words = [bound.get(word, word) for word in arguments]
        return words[0] == words[1] if operator == "=" else (operator, *words) in self.facts

    def _exists(
        self, variables: list[tuple[str, str]], parts: list[list[Any]], bound: Mapping[str, str]
    ) -> bool:
        """Whether values for the variables make all parts true; parts are tested early."""
        known = [part for part in parts if _variables(part) <= bound.keys()]
        if not all(self._holds(part, bound) for part in known):
            return False
        if not variables:
            return True
        (name, kind), *others = variables
        left = [part for part in parts if part not in known]
        return any(self._exists(others, left, {**bound, name: x}) for x in self._of_type(kind))


def _variables(formula: list[Any]) -> set[str]:
    """The variables in a formula that are not its own."""
    if formula[0] == "exists":
        return _variables(formula[2]) - set(typed(formula[1]))
    parts = [_variables(part) if isinstance(part, list) else {part} for part in formula[1:]]
    return {word for part in parts for word in part if word.startswith("?")}


def readable_names(types: Mapping[str, str]) -> dict[str, str]:
    """`cabinet 1` for `Cabinet_bar__minus_00_dot_50…`: the last id of a kind has number 1."""
    counts: Counter[str] = Counter()
    names = {}
    for x in sorted(types, reverse=True):
        text = x
        for code, character in _PUNCTUATION.items():
            text = text.replace(code, character)
        kind, bar, _ = text.partition("|")
        if not bar:
            names[x] = text
            continue
        if "basin" in x:
            kind += "basin"
        counts[kind] += 1
        names[x] = f"{kind} {counts[kind]}"
    return names


def _listed(words: list[str]) -> str:
    """`a, b, and c`; "nothing" for an empty list."""
    if len(words) < 2:
        return words[0] if words else "nothing"
    return re.sub(r", ([^,]*)$", r", and \1", ", ".join(words))
