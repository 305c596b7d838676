"""A shop of our own making, served as AgentGym's `webshop`."""

from typing import Any, cast

from envs.game import EnvironmentSpec, Session, SessionRoute
from envs.webshop.game import WebShop
from envs.webshop.oracle import oracle
from envs.webshop.tasks import GOALS, items


def _started(session: Session) -> list[Any]:
    return [session.current.observation, None]


def _stepped(session: Session) -> dict[str, Any]:
    step = session.current
    return {"state": step.observation, "reward": step.reward, "done": step.done, "info": None}


def _shop(session: Session) -> WebShop:
    return cast(WebShop, session.game)


SPEC = EnvironmentSpec(
    name="webshop",
    health="ok",
    family="env_idx",
    item_field="session_id",
    new_game=WebShop,
    items=items,
    oracle=oracle,
    default_item=lambda session: session.id % GOALS,
    reset_answer=_started,
    step_answer=_stepped,
    routes=(
        SessionRoute("/available_actions", lambda session: _shop(session).available_actions()),
        SessionRoute("/instruction_text", lambda session: _shop(session).goal.instruction),
        SessionRoute("/state", lambda session: _shop(session).state()),
    ),
)
