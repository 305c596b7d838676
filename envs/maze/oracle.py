"""The maze oracle: walks the shortest path and says where the goal is."""

import re

from envs.game import GameError, Move, Policy
from envs.maze.tasks import DIRECTIONS, Position, maze, moved

_POSITION = re.compile(r"current position is at position (\d+), (\d+)")


def oracle(item: int) -> Policy:
    """A policy for `item`, which reads the position from the observation."""
    layout = maze(item)
    steps = layout.distances()

    def policy(observation: str) -> Move:
        found = _POSITION.search(observation)
        if found is None:
            raise GameError(f"no position in the observation {observation!r}")
        here = (int(found.group(1)), int(found.group(2)))
        action = next(
            action
            for action, direction in DIRECTIONS.items()
            if steps.get(moved(here, direction), steps[here]) < steps[here]
        )
        word = action.removeprefix("move ")
        where = _relation(here, layout.goal)
        if steps[here] == 1:
            return Move(f"The goal is {where} of me, right next to me. I move {word}.", action)
        return Move(f"The goal is {where} of me. The way {word} is open and leads there.", action)

    return policy


def _relation(here: Position, goal: Position) -> str:
    down, right = goal[0] - here[0], goal[1] - here[1]
    parts = []
    if down:
        parts.append(f"{abs(down)} {'down' if down > 0 else 'up'}")
    if right:
        parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return " and ".join(parts)
