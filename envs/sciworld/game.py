"""ScienceWorld as a game, played on the simulator of a session.

A step queries only the outcome and the score. The list of valid actions, which costs ten times a
step, is computed only on request.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from envs.game import GameError, Step
from envs.sciworld.simulators import POOL, SimulatorPool, broken_connection
from envs.sciworld.tasks import Task, pair

MAX_MOVES = 100
FIRST_ACTION = "look around"

T = TypeVar("T")


class SciWorld:
    """One session, which leases a simulator from the pool until it is closed."""

    def __init__(self, pool: SimulatorPool = POOL) -> None:
        self._pool = pool
        self._simulator: Any = pool.lease()
        self._task: Task | None = None
        self.variation = 0
        self.description = ""
        self._observation = ""
        self._score = 0
        self._done = False

    @property
    def task(self) -> Task:
        """The current task."""
        if self._task is None:
            raise GameError("The game has not been reset: call reset with a data_idx first.")
        return self._task

    def reset(self, item: int) -> str:
        task, variation = pair(item)
        if self._simulator is None:
            self._simulator = self._pool.lease()

        def start(simulator: Any) -> tuple[str, str]:
            simulator.load(task.name, variation, "")
            return simulator.get_task_description(), simulator.server.step(FIRST_ACTION)

        self.description, self._observation = self._ask(start)
        self._task, self.variation = task, variation
        self._score = 0
        self._done = False
        return self._observation

    def step(self, action: str) -> Step:
        task = self.task
        if self._done:
            raise GameError("The episode has ended: reset before the next step.")

        def play(simulator: Any) -> tuple[str, float, bool, int]:
            server = simulator.server
            observation = server.step(action)
            return observation, server.getScore(), server.getCompleted(), server.getNumMoves()

        self._observation, share, completed, moves = self._ask(play)
        score = round(100 * share)
        reward = score - self._score
        self._score = score
        self._done = completed or score < 0 or moves > MAX_MOVES
        info = {"score": score, "task_name": task.name, "var_num": self.variation}
        return Step(self._observation, reward, self._done, info)

    def observation(self) -> str:
        if self._task is None:
            raise GameError("The game has not been reset: call reset with a data_idx first.")
        return self._observation

    def close(self) -> None:
        if self._simulator is not None:
            self._pool.give_back(self._simulator)
            self._simulator = None

    def query(self, question: Callable[[Any], T]) -> T:
        """The result of a query about the current state."""
        self.task  # noqa: B018  (raises before the first reset)
        return self._ask(question)

    def _ask(self, question: Callable[[Any], T]) -> T:
        """Queries the simulator. One that has died is replaced at the next reset."""
        if self._simulator is None:
            raise GameError("The simulator of this session is gone: reset to get another.")
        try:
            return question(self._simulator)
        except broken_connection() as error:
            simulator, self._simulator = self._simulator, None
            self._pool.discard(simulator)
            raise GameError("The simulator of this session died: reset to get another.") from error
