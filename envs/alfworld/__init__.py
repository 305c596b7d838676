"""ALFWorld: household tasks in a text world, served as AgentGym's `alfworld`."""

from typing import Any, cast

from envs.alfworld.game import AlfWorld, plausible_actions
from envs.alfworld.games import items, missing, number_of_items
from envs.alfworld.oracle import oracle
from envs.game import EnvironmentSpec, Session, SessionRoute, step_fields


def _actions(session: Session) -> list[str]:
    return list(cast(AlfWorld, session.game).world.commands())


def _started(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "observation": session.current.observation,
        "available_actions": _actions(session),
        "task_type": cast(AlfWorld, session.game).world.problem.name,
    }


def _stepped(session: Session) -> dict[str, Any]:
    return {**step_fields(session), "available_actions": _actions(session)}


def _detail(session: Session) -> dict[str, Any]:
    return {**_stepped(session), "deleted": False}


SPEC = EnvironmentSpec(
    name="alfworld",
    health="This is environment AlfWorld.",
    family="id",
    item_field="game",
    new_game=AlfWorld,
    items=items,
    item_count=number_of_items,
    oracle=oracle,
    plausible_actions=plausible_actions,
    reset_answer=_started,
    step_answer=_stepped,
    detail_answer=_detail,
    routes=(SessionRoute("/available_actions", _actions),),
    requirements=missing,
)
