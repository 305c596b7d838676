"""BabyAI: rooms, objects and doors on a grid, served as AgentGym's `babyai`."""

from typing import Any, cast

from envs.babyai.game import BabyAIGame
from envs.babyai.levels import items
from envs.babyai.oracle import oracle
from envs.babyai.picture import data_uri
from envs.game import EnvironmentSpec, Session, SessionRoute, Step, step_fields

INSTRUCTION = """\
You explore rooms on a grid and reach a goal that the first observation names. Every observation \
tells you what you see and which actions are possible.
Answer every observation with one action:
- turn left
- turn right
- move forward
- go to <object> <id>: walk up to it, e.g. go to red ball 1
- pick up <object> <id>: walk up to it and take it; you can carry one object
- drop: put down what you carry on the free place in front of you
- go through <door> <id>: for an open door
- toggle and go through <door> <id>: for a closed door, or for a locked door if you carry the key \
of its color
- toggle: open the door or the box right in front of you
- check available actions
Your answer has this format:

Thought:
why you do it

Action:
the action"""


def _stepped(session: Session) -> dict[str, Any]:
    return {**step_fields(session), "score": session.total_reward}


def _started(session: Session) -> dict[str, Any]:
    return {**_stepped(session), "deleted": False}


def _picture(session: Session) -> str:
    return data_uri(cast(BabyAIGame, session.game).level)


def _won(step: Step) -> bool:
    return step.done and step.reward > 0


SPEC = EnvironmentSpec(
    name="babyai",
    health="This is environment BabyAI.",
    family="id",
    item_field="data_idx",
    new_game=BabyAIGame,
    items=items,
    instruction=INSTRUCTION,
    oracle=oracle,
    answers_when_done=False,
    reset_answer=_started,
    step_answer=_stepped,
    observation_answer=_started,
    routes=(SessionRoute("/render", _picture, "POST"),),
    won=_won,
)
