"""TextCraft: get and craft items until the goal is made.

Observations have the form of AgentGym's TextCraft, including the "minecraft:" names, so an agent
trained on one can play the other. All recipes of the book work, whether shown or not.
"""

import re
from collections import Counter
from collections.abc import Sequence

from envs.game import GameError, Step
from envs.textcraft.book import load_book
from envs.textcraft.tasks import task

# No recipe needs six digits; without a limit, int() would reject very long numbers.
_GET = re.compile(r"get ([0-9]{1,6}) (.+)")
_CRAFT = re.compile(r"craft (.+?) using (.+)")
_COUNTED = re.compile(r"([0-9]{1,6}) (.+)")
_MAX_ECHO = 200


class _Refused(Exception):
    """The action has no effect; the message is the observation."""


class TextCraft:
    """One session: a goal and an inventory."""

    def __init__(self) -> None:
        self._book = load_book()
        self._goal: str | None = None
        self._inventory: Counter[str] = Counter()
        self._observation = ""
        self._done = False

    def reset(self, item: int) -> str:
        chosen = task(item)
        self._goal = chosen.goal
        self._inventory = Counter()
        self._done = False
        commands = "\n".join(chosen.commands)
        self._observation = f"Crafting commands:\n{commands}\n\nGoal: craft {chosen.goal}."
        return self._observation

    def step(self, action: str) -> Step:
        if self._goal is None:
            raise GameError("The game has not been reset.")
        if self._done:
            raise GameError("The game has finished.")
        try:
            self._observation, made = self._play(action.strip())
        except _Refused as refusal:
            self._observation, made = str(refusal), None
        self._done = made == self._goal
        return Step(self._observation, int(self._done), self._done)

    def observation(self) -> str:
        if self._goal is None:
            raise GameError("The game has not been reset.")
        return self._observation

    def close(self) -> None:
        self._inventory.clear()

    def _play(self, action: str) -> tuple[str, str | None]:
        """The observation and the new item, if any."""
        if action.startswith("inventory"):
            return self._list_inventory(), None
        if found := _GET.fullmatch(action):
            return self._get(int(found.group(1)), found.group(2))
        if found := _CRAFT.fullmatch(action):
            return self._craft(found.group(1), found.group(2))
        raise _Refused(f"Could not execute {_echo(action)}")

    def _list_inventory(self) -> str:
        listed = " ".join(f"[{item}] ({amount})" for item, amount in self._inventory.items())
        return f"Inventory: {listed or 'You are not carrying anything.'}"

    def _get(self, amount: int, item: str) -> tuple[str, str]:
        if not self._book.can_be_got(item):
            raise _Refused(f"Could not find {_echo(item)}")
        if amount:
            self._inventory[item] += amount
        return f"Got {amount} {item}", item

    def _craft(self, output: str, inputs: str) -> tuple[str, str]:
        counted = _COUNTED.fullmatch(output)
        wanted, item = (int(counted.group(1)), counted.group(2)) if counted else (1, output)
        given: Counter[str] = Counter()
        for part in inputs.split(","):
            found = _COUNTED.fullmatch(part.strip())
            if found is None:
                raise _Refused(f"Wrong item format: {_echo(part.strip())}")
            given[found.group(2)] += int(found.group(1))
        if any(self._inventory[name] < amount for name, amount in given.items()):
            raise _Refused(f"Could not find enough items to craft {_echo(_game_id(item))}")
        recipe = self._book.match(item, given)
        if recipe is None:
            tag = f"ItemTag(tag=None, item_id='{_echo(_game_id(item))}')"
            asked = f"ItemTagWithCount(item_tag={tag}, count={wanted})"
            raise _Refused(f"Could not find a valid recipe for {asked}")
        self._inventory[item] += recipe.count
        self._inventory -= given
        return f"Crafted {recipe.count} {_game_id(item)}", item


def _game_id(item: str) -> str:
    return "minecraft:" + item.replace(" ", "_")


def _echo(text: str) -> str:
    """The agent's text, shortened for the observation."""
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "..."


def plausible_actions(observations: Sequence[str]) -> Sequence[str]:
    """The listed crafting commands, getting their ingredients, and the inventory."""
    crafts = re.findall(r"^craft .+$", observations[0], re.MULTILINE)
    ingredients = [part for craft in crafts for part in craft.partition(" using ")[2].split(", ")]
    return [*crafts, *(f"get {ingredient}" for ingredient in ingredients), "inventory"]
