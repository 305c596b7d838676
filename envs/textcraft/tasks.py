"""The tasks: the goal of an item, the commands it shows, and a plan that reaches the goal.

Tasks are derived from the book by sorting on digests instead of using a random generator, so an
item is the same task on every machine and in every Python version. Items are ordered from the
shortest plan to the longest, once per variant (different distractors and kinds of wood).
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs.game import GameError
from envs.textcraft.book import Book, Recipe, load_book

VARIANTS = 2
MAX_PLAN = 16
MIN_DISTRACTORS = 5
MAX_DISTRACTORS = 10


@dataclass(frozen=True)
class Get:
    """Take `amount` pieces of an item that no recipe makes."""

    item: str
    amount: int


@dataclass(frozen=True)
class Craft:
    """Use a recipe once. `used` are the concrete items, where the recipe may name a group."""

    recipe: Recipe
    used: tuple[tuple[str, int], ...]


Plan = tuple[Get | Craft, ...]


@dataclass(frozen=True)
class Task:
    goal: str
    commands: tuple[str, ...]
    plan: Plan


def items(split: str) -> Sequence[int]:
    """The items of "train" or "test"; no goal is in both."""
    if split not in ("train", "test"):
        raise GameError(f"unknown split {split!r}; there are: train, test")
    goals = _goals()
    return [
        item
        for item in range(VARIANTS * len(goals))
        if _is_test_goal(goals[item % len(goals)]) == (split == "test")
    ]


def number_of_items() -> int:
    return VARIANTS * len(_goals())


@functools.cache
def task(item: int) -> Task:
    """The task of an item; GameError for an unknown item."""
    if not 0 <= item < number_of_items():
        raise GameError(f"The item {item} is not valid: there are 0 to {number_of_items() - 1}.")
    goals = _goals()
    variant, index = divmod(item, len(goals))
    goal = goals[index]
    book = load_book()
    plan = _plan(goal, variant)
    used = list(dict.fromkeys(move.recipe for move in plan if isinstance(move, Craft)))
    names = frozenset[str]().union(*(recipe.names for recipe in used))
    salt = f"{variant}/{goal}"
    related = [recipe for recipe in book.recipes if names & recipe.names and recipe not in used]
    distractors = sorted(related, key=lambda recipe: _digest(salt, recipe.command))[
        :MAX_DISTRACTORS
    ]
    if len(distractors) < MIN_DISTRACTORS:
        others = [recipe for recipe in book.recipes if not names & recipe.names]
        others.sort(key=lambda recipe: _digest(salt, recipe.command))
        distractors += others[: MIN_DISTRACTORS - len(distractors)]
    shown = sorted([*used, *distractors], key=lambda recipe: _digest("order", salt, recipe.command))
    return Task(goal, tuple(recipe.command for recipe in shown), plan)


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).digest()


def _is_test_goal(goal: str) -> bool:
    return _digest("split", goal)[0] % 5 == 0


@functools.cache
def _goals() -> tuple[str, ...]:
    book = load_book()
    plans = {goal: _plan(goal, variant=0) for goal in book.by_output}
    short = [goal for goal, plan in plans.items() if len(plan) <= MAX_PLAN]
    return tuple(sorted(short, key=lambda goal: (len(plans[goal]), goal)))


@functools.cache
def _effort(name: str) -> int:
    """The number of different items to get or craft for one piece of an item or group."""
    book = load_book()
    if name in book.groups:
        return min(_effort(member) for member in book.groups[name])
    if name not in book.by_output:
        return 1
    return 1 + min(
        sum(_effort(part) for part, _ in recipe.inputs) for recipe in book.by_output[name]
    )


def _easiest_recipe(book: Book, item: str) -> Recipe:
    return min(
        book.by_output[item],
        key=lambda recipe: (sum(_effort(part) for part, _ in recipe.inputs), recipe.command),
    )


def _member(book: Book, group: str, wanted: Counter[str], salt: str) -> str:
    """The member to use for a group: one that the plan needs anyway, else one of the easiest."""
    least = _effort(group)
    easiest = [member for member in book.groups[group] if _effort(member) == least]
    needed = [member for member in easiest if wanted[member]]
    return min(needed or easiest, key=lambda member: _digest("member", salt, group, member))


@functools.cache
def _plan(goal: str, variant: int) -> Plan:
    """A short plan for the goal: the easiest recipes, replaced as long as that saves moves."""
    book = load_book()
    choice: dict[str, Recipe] = {}
    best = _plan_with(book, goal, variant, choice)
    improved = True
    while improved:
        improved = False
        outputs = {move.recipe.output for move in best if isinstance(move, Craft)}
        for output in sorted(outputs):
            for recipe in book.by_output[output]:
                plan = _plan_with(book, goal, variant, {**choice, output: recipe})
                if len(plan) < len(best):
                    best, choice, improved = plan, {**choice, output: recipe}, True
    return best


def _plan_with(book: Book, goal: str, variant: int, choice: Mapping[str, Recipe]) -> Plan:
    """Gets and crafts that end with the goal; each ingredient is obtained before its first use."""
    recipes: dict[str, Recipe] = {}
    used: dict[str, tuple[tuple[str, int], ...]] = {}
    order: list[str] = []
    wanted: Counter[str] = Counter()

    def visit(item: str) -> None:
        if item in order or item in recipes:
            return
        if item in book.by_output:
            recipe = recipes[item] = choice.get(item) or _easiest_recipe(book, item)
            wanted.update(name for name, _ in recipe.inputs)
            concrete: Counter[str] = Counter()
            for name, amount in recipe.inputs:
                if name in book.groups:
                    name = _member(book, name, wanted, f"{variant}/{goal}")
                concrete[name] += amount
            used[item] = tuple(concrete.items())
            for name in concrete:
                visit(name)
        order.append(item)

    visit(goal)
    amounts = Counter({goal: 1})
    batches: dict[str, int] = {}
    for item in reversed(order):
        if item in recipes:
            batches[item] = -(-amounts[item] // recipes[item].count)
            for name, amount in used[item]:
                amounts[name] += amount * batches[item]
    moves: list[Get | Craft] = []
    for item in order:
        if item in recipes:
            moves += [Craft(recipes[item], used[item])] * batches[item]
        else:
            moves.append(Get(item, amounts[item]))
    return tuple(moves)
