"""A web shop with a generated catalogue, served as AgentGym's `webshop`."""

from typing import Any, cast

from envs.game import EnvironmentSpec, Session, SessionRoute, observation_pair
from envs.webshop.game import WebShop, plausible_actions
from envs.webshop.oracle import oracle
from envs.webshop.tasks import GOALS, items


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
    item_count=lambda: GOALS,
    oracle=oracle,
    plausible_actions=plausible_actions,
    default_item=lambda session: session.number % GOALS,
    reset_answer=observation_pair,
    step_answer=_stepped,
    routes=(
        SessionRoute("/available_actions", lambda session: _shop(session).available_actions()),
        SessionRoute("/instruction_text", lambda session: _shop(session).goal.instruction),
        SessionRoute("/state", lambda session: _shop(session).state()),
    ),
)
