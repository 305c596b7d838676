"""The text maze: reach the goal within 50 moves, guided by the walls around you.

Observations and rewards are those of AgentGym's maze (LMRL-Gym's, fully observed). An action that
is not a move, or runs into a wall, only increases the move count. Any action after the limit fails.
"""

from envs.game import GameError, Step
from envs.maze.tasks import DIRECTIONS, MAX_STEPS, Maze, Position, maze, moved

ACTIONS = list(DIRECTIONS)
_SIDES = {
    "to your right": "move right",
    "to your left": "move left",
    "above you": "move up",
    "below you": "move down",
}


class MazeGame:
    """One session: a maze, the agent's position and its number of moves."""

    def __init__(self) -> None:
        self._maze: Maze | None = None
        self._position: Position = (0, 0)
        self._moves = 0
        self._observation = ""
        self._done = False

    def reset(self, item: int) -> str:
        self._maze = maze(item)
        self._position = self._maze.start
        self._moves = 0
        self._done = False
        self._observation = describe(self._maze, self._position)
        return self._observation

    def step(self, action: str) -> Step:
        if self._maze is None:
            raise GameError("The game has not been reset.")
        if self._done:
            raise GameError("The game has finished.")
        if self._moves >= MAX_STEPS:
            return self._end("Failure\n", -1.0)
        self._moves += 1
        target = moved(self._position, DIRECTIONS.get(action.strip(), (0, 0)))
        if target in self._maze.open_cells:
            self._position = target
        if self._position == self._maze.goal:
            return self._end("Success\n", 1.0)
        self._observation = describe(self._maze, self._position)
        return Step(self._observation, 0, False)

    def observation(self) -> str:
        if self._maze is None:
            raise GameError("The game has not been reset.")
        return self._observation

    def close(self) -> None:
        self._maze = None

    def _end(self, observation: str, reward: float) -> Step:
        self._observation = observation
        self._done = True
        return Step(observation, reward, True)


def describe(layout: Maze, position: Position) -> str:
    """The observation at a position: the goal, the position and the walls around it."""
    walls = [
        side
        for side, move in _SIDES.items()
        if moved(position, DIRECTIONS[move]) not in layout.open_cells
    ]
    if not walls:
        seen = "There are no walls near you."
    elif len(walls) == 1:
        seen = f"There is a wall {walls[0]}."
    else:
        seen = f"There are walls {', '.join(walls)}."
    return (
        f"The goal is at position {layout.goal[0]}, {layout.goal[1]}. "
        f"Your current position is at position {position[0]}, {position[1]}. {seen}"
    )
