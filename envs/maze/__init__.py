"""The text maze, served as AgentGym's `maze` under /maze."""

from typing import Any

from envs.game import EnvironmentSpec, Session, StaticRoute, detail_fields
from envs.maze.game import ACTIONS, MazeGame
from envs.maze.oracle import oracle
from envs.maze.tasks import items

INSTRUCTION = """\
You walk through a maze and have to reach the goal within 50 moves, the fewer the better. Every \
observation tells the position of the goal, your own position, and on which of your four sides \
there is a wall.
A position is a row and a column: moving down adds 1 to the first number, moving right adds 1 to \
the second. Walking into a wall leaves you where you are. Sometimes the way to the goal first \
leads away from it.
The actions are: move up, move down, move left, move right.
Your answer has this format:

Thought:
why you do it

Action:
the action"""


def _detail(session: Session) -> dict[str, Any]:
    return {**detail_fields(session), "maze_name": "maze", "reward": session.total_reward}


SPEC = EnvironmentSpec(
    name="maze",
    health="This is environment LMRL-Gym.",
    family="id",
    prefix="/maze",
    item_field="game",
    new_game=MazeGame,
    items=items,
    instruction=INSTRUCTION,
    oracle=oracle,
    cheap=True,
    answers_when_done=False,
    detail_answer=_detail,
    routes=(StaticRoute("/available_actions", lambda: ACTIONS),),
)
