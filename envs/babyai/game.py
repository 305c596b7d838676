"""BabyAI as a text game: an action sentence goes in, a description of the new view comes out.

Each action is executed as low-level minigrid actions, and minigrid decides the outcome. Success,
failure of the mission and reaching the step limit all end the episode. The reward is minigrid's
1 - 0.9 * steps / limit, given once.
"""

import re
from collections.abc import Sequence
from typing import Any

from envs.babyai.levels import new_level
from envs.babyai.sight import Cell, Sight, Thing, look, walks
from envs.game import GameError, Step

UNRECOGNIZED = "The action is not recognized. Please check valid actions."
LIST_ACTIONS = "check available actions"


class BabyAIGame:
    """The level of one session."""

    def __init__(self) -> None:
        self._level: Any = None
        self._sight: Sight | None = None
        self._ways: dict[Cell, list[str]] | None = None
        self._observation = ""
        self._reward = 0.0
        self._done = False

    @property
    def level(self) -> Any:
        """The current minigrid environment."""
        if self._level is None:
            raise GameError("The game has not been reset: call reset with a data_idx first.")
        return self._level

    @property
    def sight(self) -> Sight:
        """What the agent sees now."""
        if self._sight is None:
            self._sight = look(self.level)
        return self._sight

    def reset(self, item: int) -> str:
        self._level = new_level(item)
        self._reward = 0.0
        self._done = False
        self._moved()
        return self._tell(f"Your goal: {self._level.mission}\n{self.sight.describe()}")

    def step(self, action: str) -> Step:
        if self._done:
            raise GameError("The episode has ended: reset before the next step.")
        message = self._play(action.strip().lower())
        return Step(self._tell(message), self._reward, self._done)

    def observation(self) -> str:
        if self._level is None:
            raise GameError("The game has not been reset: call reset with a data_idx first.")
        return self._observation

    def close(self) -> None:
        self._level = None

    def ways(self) -> dict[Cell, list[str]]:
        """The minigrid actions that lead to each reachable thing in sight, by its cell."""
        if self._ways is None:
            self._ways = walks(self.level, self.sight)
        return self._ways

    def available_actions(self) -> list[str]:
        """What the agent can do now, in the order of the observation."""
        sight = self.sight
        ways = self.ways()
        actions = ["turn left", "turn right"]
        if sight.facing is None or sight.facing[1] > 1:
            actions.append("move forward")
        if sight.carrying is not None:
            actions.append("drop")
        near = [thing for thing in sight.things.values() if thing.cell in ways]
        if sight.carrying is None:
            actions += [f"pickup {thing.name}" for thing in near if not thing.is_door]
        actions += [
            f"toggle and go through {thing.name}"
            for thing in near
            if thing.is_door and not thing.object.is_open and self._lock_trouble(thing) is None
        ]
        if self._can_toggle(sight.ahead()):
            actions.append("toggle")
        actions += [
            f"go through {thing.name}" for thing in near if thing.is_door and thing.object.is_open
        ]
        actions += [f"go to {thing.name}" for thing in near]
        return [*actions, LIST_ACTIONS]

    def _play(self, action: str) -> str:
        """Executes `action` and describes the result."""
        sight = self.sight
        if action in ("turn left", "turn right"):
            return self._act([action.removeprefix("turn ")])
        if action == "move forward":
            if sight.facing is not None and sight.facing[1] == 1:
                return "There is a barrier in front of you, you can't move forward."
            return self._act(["forward"])
        if action == "drop" and sight.carrying is not None:
            if sight.ahead() is not None or (sight.facing is not None and sight.facing[1] == 1):
                return "You cannot drop the object, as there is already an object in front of you."
            return self._act(["drop"])
        if action == "toggle":
            return self._toggle(sight.ahead())
        if action == LIST_ACTIONS:
            return f"You can take the following actions: {', '.join(self.available_actions())}"
        for verb, moves in _VERBS.items():
            if action.startswith(f"{verb} "):
                thing = sight.things.get(action.removeprefix(f"{verb} "))
                return UNRECOGNIZED if thing is None else self._approach(verb, thing, moves)
        return UNRECOGNIZED

    def _approach(self, verb: str, thing: Thing, moves: Sequence[str]) -> str:
        """Walks to `thing` and executes `moves` there, if the verb applies to it."""
        if verb in ("pickup", "pick up") and (thing.is_door or self.sight.carrying is not None):
            return UNRECOGNIZED
        if verb.endswith("go through"):
            if not thing.is_door or thing.object.is_open == verb.startswith("toggle"):
                return UNRECOGNIZED
            if (trouble := self._lock_trouble(thing)) is not None:
                return f"You cannot {verb} {thing.name}, as {trouble}."
        way = self.ways().get(thing.cell)
        if way is None:
            return f"You cannot {verb} {thing.name}, as there is no path leading to it."
        if not way and not moves:
            return "No change in state."
        return self._act([*way, *moves])

    def _toggle(self, thing: Thing | None) -> str:
        if thing is None or not (thing.is_door or thing.object.type == "box"):
            return UNRECOGNIZED
        if (trouble := self._lock_trouble(thing)) is not None:
            return f"You cannot toggle {thing.name}, as {trouble}."
        return self._act(["toggle"])

    def _can_toggle(self, thing: Thing | None) -> bool:
        if thing is None:
            return False
        if thing.is_door:
            return not thing.object.is_open and self._lock_trouble(thing) is None
        return bool(thing.object.type == "box")

    def _lock_trouble(self, door: Thing) -> str | None:
        """Why a locked door cannot be opened with what the agent carries."""
        if not door.is_door or not door.object.is_locked:
            return None
        carried = self.level.carrying
        if carried is None or carried.type != "key":
            return "you are not carrying a key"
        if carried.color != door.object.color:
            return "the color of the key you are carrying does not match the color of door"
        return None

    def _act(self, moves: Sequence[str]) -> str:
        """Executes minigrid actions until all are done or the episode ends."""
        level = self.level
        ending = ""
        for move in moves:
            _, reward, terminated, truncated, _ = level.step(level.actions[move])
            if terminated or truncated:
                self._done = True
                self._reward = float(reward)
                ending = _ENDINGS[bool(reward > 0), bool(terminated)]
                break
        self._moved()
        return self.sight.describe() + ending

    def _moved(self) -> None:
        self._sight = None
        self._ways = None

    def _tell(self, message: str) -> str:
        quoted = ", ".join(f'"{action}"' for action in self.available_actions())
        self._observation = f"{message}\nAvailable actions: [{quoted}]"
        return self._observation


def plausible_actions(observations: Sequence[str]) -> Sequence[str]:
    """The actions that the latest observation lists."""
    listed = observations[-1].rpartition("Available actions: ")[2]
    return re.findall(r'"([^"]+)"', listed) or [LIST_ACTIONS]


_VERBS: dict[str, tuple[str, ...]] = {
    "go to": (),
    "pickup": ("pickup",),
    "pick up": ("pickup",),
    "go through": ("forward",),
    "toggle and go through": ("toggle", "forward"),
}
"""Each verb that takes a thing → the minigrid actions once the agent stands in front of it."""

_ENDINGS = {
    (True, True): "\n The task is completed.",
    (True, False): "\n The task is completed.",
    (False, True): "\n The task has failed.",
    (False, False): "\n The step limit is reached. The task has failed.",
}
"""By (rewarded, terminated)."""
