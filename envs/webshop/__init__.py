"""A shop of our own making, served as AgentGym's `webshop`."""

from typing import Any, cast

from envs.game import EnvironmentSpec, Session, SessionRoute
from envs.webshop.game import WebShop
from envs.webshop.oracle import oracle
from envs.webshop.tasks import GOALS, items

INSTRUCTION = """\
You shop online for what the instruction asks for. Every observation is a page; its parts are \
separated by [SEP].
Answer every observation with one action:
- search[keywords]: only on the page with the search bar
- click[value]: a button, a product by its code, or an option, as the page writes it, e.g. \
click[back to search], click[next >], click[large], click[buy now]
A product page leads to its description and features. Choose every option that the instruction \
names before you buy. You can buy once, and the purchase is scored.
Your answer has this format:

Thought:
why you do it

Action:
the action"""


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
    instruction=INSTRUCTION,
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
