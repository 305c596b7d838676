"""The text maze, served as AgentGym's `maze` under /maze."""

from typing import Any

from envs.game import EnvironmentSpec, Session, StaticRoute, detail_fields
from envs.maze.game import ACTIONS, MazeGame
from envs.maze.oracle import oracle
from envs.maze.tasks import TEST, items


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
    item_count=lambda: TEST.stop,
    oracle=oracle,
    cheap=True,
    answers_when_done=False,
    detail_answer=_detail,
    routes=(StaticRoute("/available_actions", lambda: ACTIONS),),
)
