"""SQL questions on small databases, served as AgentGym's `sqlgym`."""

from typing import Any

from envs.game import EnvironmentSpec, Move, Policy, Session, observation_pair
from envs.sqlgym.game import SqlGame
from envs.sqlgym.tasks import COUNT, items, question


def oracle(item: int) -> Policy:
    """A policy that answers with the reference query."""
    asked = question(item)

    def policy(_: str) -> Move:
        return Move(f'I need the rows that answer "{asked.text}"', asked.sql)

    return policy


def _stepped(session: Session) -> dict[str, Any]:
    step = session.current
    return {
        "state": step.observation,
        "reward": step.reward,
        "done": step.done,
        "info": dict(step.info),
    }


SPEC = EnvironmentSpec(
    name="sqlgym",
    health="ok",
    family="env_idx",
    item_field="item_id",
    new_game=SqlGame,
    items=items,
    item_count=lambda: COUNT,
    oracle=oracle,
    reset_answer=observation_pair,
    step_answer=_stepped,
)
