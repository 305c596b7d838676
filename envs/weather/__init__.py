"""A weather assistant with tools and an invented climate, served as AgentGym's `weather`."""

import json
from collections.abc import Iterator

from pydantic import BaseModel

from envs.game import EnvironmentSpec, Move, Policy, Session, observation_text
from envs.weather.game import Weather
from envs.weather.tasks import ITEMS, items, question
from envs.weather.tools import FINISH


class CreateBody(BaseModel):
    """The body of /create: AgentGym's tool servers take the item there."""

    id: int


def oracle(item: int) -> Policy:
    """A policy that makes the calls listed for the question and gives its answer."""
    plan = _plan(item)

    def policy(_: str) -> Move:
        return next(plan)

    return policy


def _plan(item: int) -> Iterator[Move]:
    asked = question(item)
    for why, tool, arguments in asked.calls:
        yield Move(why, _action(tool, arguments))
    yield Move("Now I know the answer.", _action(FINISH, {"answer": asked.answer}))


def _action(tool: str, arguments: dict[str, object]) -> str:
    return f"{tool} with Action Input: {json.dumps(arguments)}"


def _same_item(session: Session) -> int:
    return session.item if session.item is not None else 0


SPEC = EnvironmentSpec(
    name="weather",
    health="ok",
    family="env_idx",
    item_field="id",
    new_game=Weather,
    items=items,
    item_count=lambda: ITEMS,
    oracle=oracle,
    create_body=CreateBody,
    create_item=lambda _, body: body.id,
    default_item=_same_item,
    reset_answer=observation_text,
)
