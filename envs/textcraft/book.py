"""The recipe book: `book.json` expanded into recipes.

A line of the file may be repeated for every kind of wood, colour or stone, so a few hundred lines
yield 738 recipes. A generic ingredient such as "planks" is a group of items: a recipe that names it
accepts any mix of its members.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_AMOUNT = re.compile(r"(\d+) (.+)")
_FIELD = re.compile(r"\{(\w+)\*?\}")


@dataclass(frozen=True)
class Recipe:
    """`inputs`, pairs of an item or group and its amount, make `count` pieces of `output`."""

    output: str
    count: int
    inputs: tuple[tuple[str, int], ...]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All items and groups that the recipe mentions."""
        return frozenset([self.output, *dict(self.inputs)])

    @functools.cached_property
    def command(self) -> str:
        ingredients = ", ".join(f"{amount} {name}" for name, amount in self.inputs)
        return f"craft {self.count} {self.output} using {ingredients}"


@dataclass(frozen=True)
class Book:
    """All recipes in the order of the file, the groups with their members, and all items."""

    recipes: tuple[Recipe, ...]
    by_output: Mapping[str, tuple[Recipe, ...]]
    groups: Mapping[str, tuple[str, ...]]
    items: frozenset[str]

    def can_be_got(self, name: str) -> bool:
        """Whether it is an item that no recipe makes."""
        return name in self.items and name not in self.by_output

    def match(self, output: str, given: Mapping[str, int]) -> Recipe | None:
        """The recipe for `output` that uses exactly the given items, or None."""
        for recipe in self.by_output.get(output, ()):
            if self._is_exactly(recipe, given):
                return recipe
        return None

    def _is_exactly(self, recipe: Recipe, given: Mapping[str, int]) -> bool:
        rest = Counter(given)
        for name, amount in recipe.inputs:
            if name not in self.groups:
                if rest[name] < amount:
                    return False
                rest[name] -= amount
        for name, amount in recipe.inputs:
            for member in self.groups.get(name, ()):
                used = min(rest[member], amount)
                rest[member] -= used
                amount -= used
            if name in self.groups and amount:
                return False
        return not any(rest.values())


@functools.cache
def load_book() -> Book:
    """The contents of book.json."""
    data = json.loads(Path(__file__).with_name("book.json").read_text(encoding="utf-8"))
    kinds = {name: [_kind(word) for word in words] for name, words in data["kinds"].items()}
    recipes = tuple(_recipe(line) for line in _expand(data["recipes"], kinds))
    groups = {name: tuple(_expand(lines, kinds)) for name, lines in data["groups"].items()}
    by_output: dict[str, tuple[Recipe, ...]] = {}
    for recipe in recipes:
        by_output[recipe.output] = (*by_output.get(recipe.output, ()), recipe)
    mentioned = {name for recipe in recipes for name, _ in recipe.inputs}
    members = {member for group in groups.values() for member in group}
    return Book(
        recipes, by_output, groups, frozenset(by_output) | members | mentioned - set(groups)
    )


def _kind(word: str) -> tuple[str, str]:
    name, _, block = word.partition("=")
    return name, block or name


def _expand(lines: Iterable[str], kinds: Mapping[str, list[tuple[str, str]]]) -> list[str]:
    expanded = []
    for line in lines:
        field = _FIELD.search(line)
        if field is None:
            expanded.append(line)
            continue
        kind = field.group(1)
        for name, block in kinds[kind]:
            expanded.append(line.replace(f"{{{kind}*}}", block).replace(f"{{{kind}}}", name))
    return expanded


def _recipe(line: str) -> Recipe:
    output, _, inputs = line.partition(" using ")
    count, name = _amount(output)
    amounts = (_amount(part) for part in inputs.split(", "))
    return Recipe(name, count, tuple((item, number) for number, item in amounts))


def _amount(text: str) -> tuple[int, str]:
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"book.json: {text!r} is not an amount and an item")
    return int(found.group(1)), found.group(2)
