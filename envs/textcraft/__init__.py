"""TextCraft: crafting with recipes, served as AgentGym's `textcraft`."""

from typing import Any

from pydantic import BaseModel

from envs.game import EnvironmentSpec, Session, SessionRoute, detail_fields, step_fields
from envs.textcraft.game import TextCraft
from envs.textcraft.oracle import oracle
from envs.textcraft.tasks import items, number_of_items, task

INSTRUCTION = """\
You craft an item in a world like Minecraft. The first observation lists crafting commands of the \
form "craft [count] [item] using [ingredients]" and names the goal.
Answer every observation with one action:
- get [count] [item]: take an ingredient that no crafting command makes, e.g. get 2 oak logs
- craft [count] [item] using [count] [ingredient], ...: use one of the listed commands once, with \
the counts it gives, e.g. craft 4 oak planks using 1 oak logs
- inventory: see what you carry
Some commands are not needed. A generic ingredient such as "planks" stands for any kind of it: \
name the kind you have, e.g. 2 oak planks.
Your answer has this format:

Thought:
why you do it

Action:
the action"""


class CreateBody(BaseModel):
    """What AgentGym's client sends with a create; the task comes from the item all the same."""

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
    instruction=INSTRUCTION,
    oracle=oracle,
    cheap=True,
    create_body=CreateBody,
    create_item=lambda session_id, _: session_id % number_of_items(),
    default_item=lambda _: 0,
    create_answer=_started,
    reset_answer=_started,
    step_answer=step_fields,
    detail_answer=detail_fields,
    routes=(SessionRoute("/commands", _commands), SessionRoute("/goal", _goal)),
)
