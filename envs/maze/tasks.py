"""The mazes. An item is a seed, which determines walls, start and goal.

A perfect maze is carved by depth-first search, a few more walls are opened so that there can be
several paths, and the start is chosen within the step limit of the goal. Only `Random.random()` is
used, whose sequence Python guarantees for a seed, so an item is the same maze everywhere.
"""

import functools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from envs.game import GameError, fixed_splits

TRAIN = range(0, 800)
TEST = range(800, 1000)
items = fixed_splits(TRAIN, TEST)

FIRST_SEED = 20_000
MAX_STEPS = 50
SIZES = ((7, 7), (7, 9), (9, 9), (9, 11), (9, 13), (11, 13))
MIN_DISTANCE = 3
MAX_DISTANCE = 36
EXTRA_OPENINGS = 0.08

Position = tuple[int, int]
"""Row and column; the protocol calls them x and y."""

DIRECTIONS: dict[str, Position] = {
    "move left": (0, -1),
    "move right": (0, 1),
    "move up": (-1, 0),
    "move down": (1, 0),
}

T = TypeVar("T")


@dataclass(frozen=True)
class Maze:
    open_cells: frozenset[Position]
    start: Position
    goal: Position

    def distances(self) -> dict[Position, int]:
        """Steps from every cell to the goal, by breadth-first search."""
        return _distances(self.open_cells, self.goal)


@functools.cache
def maze(item: int) -> Maze:
    """The maze of an item; GameError for an unknown item."""
    if item not in TRAIN and item not in TEST:
        raise GameError(f"The game {item} is not valid: there are 0 to {TEST[-1]}.")
    rng = random.Random(FIRST_SEED + item)
    height, width = SIZES[item % len(SIZES)]
    open_cells = _carve(height, width, rng)
    cells = sorted(open_cells)
    goal = _choose(cells, rng)
    steps = _distances(open_cells, goal)
    starts = [cell for cell in cells if MIN_DISTANCE <= steps[cell] <= MAX_DISTANCE]
    return Maze(open_cells, _choose(starts, rng), goal)


def moved(position: Position, direction: Position) -> Position:
    return position[0] + direction[0], position[1] + direction[1]


def _choose(options: Sequence[T], rng: random.Random) -> T:
    return options[int(rng.random() * len(options))]


def _carve(height: int, width: int, rng: random.Random) -> frozenset[Position]:
    """Rooms at odd rows and columns, connected by opening walls between neighbours."""
    first = (1, 1)
    open_cells = {first}
    trail = [first]
    while trail:
        row, column = trail[-1]
        closed = [
            (row + 2 * down, column + 2 * right)
            for down, right in DIRECTIONS.values()
            if 0 < row + 2 * down < height - 1
            and 0 < column + 2 * right < width - 1
            and (row + 2 * down, column + 2 * right) not in open_cells
        ]
        if not closed:
            trail.pop()
            continue
        room = _choose(closed, rng)
        open_cells |= {room, ((row + room[0]) // 2, (column + room[1]) // 2)}
        trail.append(room)
    for row in range(1, height - 1):
        for column in range(1, width - 1):
            between_rooms = (row + column) % 2 == 1
            if between_rooms and rng.random() < EXTRA_OPENINGS:
                open_cells.add((row, column))
    return frozenset(open_cells)


def _distances(open_cells: frozenset[Position], goal: Position) -> dict[Position, int]:
    steps = {goal: 0}
    queue = deque([goal])
    while queue:
        cell = queue.popleft()
        for direction in DIRECTIONS.values():
            neighbour = moved(cell, direction)
            if neighbour in open_cells and neighbour not in steps:
                steps[neighbour] = steps[cell] + 1
                queue.append(neighbour)
    return steps
