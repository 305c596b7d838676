"""TextCraft: crafting with recipes, served as AgentGym's `textcraft`."""

from typing import Any

from pydantic import BaseModel

from envs.game import EnvironmentSpec, Session, SessionRoute, detail_fields, step_fields
from envs.textcraft.game import TextCraft, plausible_actions
from envs.textcraft.oracle import oracle
from envs.textcraft.tasks import items, number_of_items, task


class CreateBody(BaseModel):
    """What AgentGym's client sends with /create. It is ignored: the item determines the task."""

    commands: str | None = None
    goal: str | None = None


def _started(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "observation": session.current.observation,
        "done": False,
        "reward": 0,
    }


def _commands(session: Session) -> str:
    return "\n".join(task(session.item).commands) if session.item is not None else ""


def _goal(session: Session) -> str:
    return task(session.item).goal if session.item is not None else ""


SPEC = EnvironmentSpec(
    name="textcraft",
    health="This is environment TextCraft.",
    family="id",
    item_field="data_idx",
    new_game=TextCraft,
    items=items,
    item_count=number_of_items,
    oracle=oracle,
    plausible_actions=plausible_actions,
    cheap=True,
    create_body=CreateBody,
    create_item=lambda session, _: session.number % number_of_items(),
    default_item=lambda _: 0,
    create_answer=_started,
    reset_answer=_started,
    step_answer=step_fields,
    detail_answer=detail_fields,
    routes=(SessionRoute("/commands", _commands), SessionRoute("/goal", _goal)),
)
