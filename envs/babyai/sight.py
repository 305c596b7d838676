"""What the agent sees, in words, and the paths to the things it sees.

Positions are relative to the agent: a `Sight` lists the visible things, nearest first, by (steps in
front, steps to the right). As in AgentGym, the path to a thing is planned on the whole grid of the
level, so it may lead through cells that the agent does not see.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Cell = tuple[int, int]
"""(steps in front of the agent, steps to its right); negative steps are to its left."""

HERE: Cell = (0, 0)
AHEAD: Cell = (1, 0)

HEADINGS = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""minigrid's directions as (x, y), in the order of turning right."""


@dataclass(frozen=True)
class Thing:
    """A visible object or door with a unique name: "grey ball 2", "red open door 1"."""

    name: str
    cell: Cell
    object: Any
    """The minigrid object."""

    @property
    def is_door(self) -> bool:
        return bool(self.object.type == "door")


@dataclass(frozen=True)
class Sight:
    """Everything visible in one state of a level."""

    things: Mapping[str, Thing]
    """By name, nearest first."""
    facing: tuple[str, int] | None
    """("wall" or "box", distance) straight ahead; None if a door or nothing is there first."""
    sees_anything: bool
    """Whether anything is in view, including walls."""
    carrying: str | None
    """Colour and type of the carried object."""

    def ahead(self) -> Thing | None:
        """The thing directly in front of the agent."""
        return next((thing for thing in self.things.values() if thing.cell == AHEAD), None)

    def describe(self) -> str:
        """The observation text."""
        if self.sees_anything:
            text = "In front of you in this room, you can see several objects: "
            text += "".join(f"There is a {_place(thing)}.  " for thing in self.things.values())
        else:
            text = "You cannot see any objects within sight."
        text += "The room has walls around you. "
        if self.facing is not None:
            text += f"You are facing a {self.facing[0]} {self.facing[1]} steps away. "
        if self.carrying is None:
            return text + "You are not carrying anything."
        return text + f"You are carrying a {self.carrying}."


def look(level: Any) -> Sight:
    """What the agent sees in a minigrid `level`."""
    grid, visible = level.gen_obs_grid()
    size = level.agent_view_size
    found: list[tuple[Cell, Any]] = []
    walls = False
    for column in range(size):
        for row in range(size):
            cell = (size - 1 - row, column - size // 2)
            if cell == HERE or not visible[column, row]:
                continue
            thing = grid.get(column, row)
            if thing is None:
                continue
            if thing.type == "wall":
                walls = True
            else:
                found.append((cell, thing))
    found.sort(key=lambda pair: (_distance(pair[0]), abs(pair[0][1]), pair[0][1]))
    carried = level.carrying
    return Sight(
        things=_number(found),
        facing=_facing(grid, size),
        sees_anything=walls or bool(found),
        carrying=None if carried is None else f"{carried.color} {carried.type}",
    )


def walks(level: Any, sight: Sight) -> dict[Cell, list[str]]:
    """The walks of `reach` to the things in sight, by cell."""
    cells = {_position(level, thing.cell): thing.cell for thing in sight.things.values()}
    return {cells[at]: way for at, way in reach(level, cells).items()}


def reach(level: Any, targets: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[str]]:
    """For each reachable (x, y) target, the shortest walk that ends directly in front of it.

    A walk is a list of "left", "right" and "forward" through free cells and open doors of the whole
    grid. At its end the agent faces the target.
    """
    wanted = set(targets)
    found: dict[tuple[int, int], list[str]] = {}
    start = (int(level.agent_pos[0]), int(level.agent_pos[1]), int(level.agent_dir))
    came: dict[_State, tuple[_State, str] | None] = {start: None}
    queue = deque([start])
    while queue and wanted:
        state = queue.popleft()
        x, y, heading = state
        ahead = (x + HEADINGS[heading][0], y + HEADINGS[heading][1])
        if ahead in wanted:
            wanted.remove(ahead)
            found[ahead] = _trace(came, state)
        cell = level.grid.get(*ahead)
        nexts = [("left", (x, y, (heading - 1) % 4)), ("right", (x, y, (heading + 1) % 4))]
        if cell is None or cell.can_overlap():
            nexts.insert(0, ("forward", (*ahead, heading)))
        for move, after in nexts:
            if after not in came:
                came[after] = (state, move)
                queue.append(after)
    return found


def _position(level: Any, cell: Cell) -> tuple[int, int]:
    """The (x, y) grid position of a cell relative to the agent."""
    front, right = cell
    facing_x, facing_y = HEADINGS[level.agent_dir]
    x, y = (int(coordinate) for coordinate in level.agent_pos)
    return x + front * facing_x - right * facing_y, y + front * facing_y + right * facing_x


_State = tuple[int, int, int]
"""(x, y, heading)."""


def _trace(came: Mapping[_State, tuple[_State, str] | None], state: _State) -> list[str]:
    moves: list[str] = []
    while (step := came[state]) is not None:
        state, move = step
        moves.append(move)
    return moves[::-1]


def _distance(cell: Cell) -> int:
    return cell[0] + abs(cell[1])


def _kind(thing: Any) -> str:
    if thing.type != "door":
        return f"{thing.color} {thing.type}"
    state = "locked" if thing.is_locked else "open" if thing.is_open else "closed"
    return f"{thing.color} {state} door"


def _number(found: list[tuple[Cell, Any]]) -> dict[str, Thing]:
    counts: dict[str, int] = {}
    things = {}
    for cell, thing in found:
        kind = _kind(thing)
        counts[kind] = counts.get(kind, 0) + 1
        name = f"{kind} {counts[kind]}"
        things[name] = Thing(name, cell, thing)
    return things


def _facing(grid: Any, size: int) -> tuple[str, int] | None:
    for steps in range(1, size):
        thing = grid.get(size // 2, size - 1 - steps)
        if thing is None:
            continue
        if thing.type in ("wall", "box"):
            return thing.type, steps
        if thing.type == "door" and not thing.is_open:
            return None
    return None


def _place(thing: Thing) -> str:
    front, right = thing.cell
    if right == 0:
        return f"{thing.name} right in front of you {front} steps away"
    side = "right" if right > 0 else "left"
    return f"{thing.name} {front} steps in front of you and {abs(right)} steps to your {side}"
