"""Wordle, served as AgentGym's `wordle` under /wordle."""

from typing import Any, cast

from envs.game import EnvironmentSpec, Session, SessionRoute, detail_fields
from envs.wordle.game import Wordle
from envs.wordle.oracle import oracle
from envs.wordle.tasks import items

INSTRUCTION = """\
You play Wordle: find a hidden word of five letters, a common English word, in at most six tries.
Write a guess as five letters with spaces between them, for example: s h i r e
The answer has one letter for each letter of your guess:
- b: the letter is not in the word
- y: the letter is in the word, but in another place
- g: the letter is in the word, in this place
A guess that is no known word is answered by "invalid word" and costs a try.
Your answer has this format:

Thought:
what you know and why you guess this word

Action:
the guess"""


def _started(session: Session) -> dict[str, Any]:
    return {"id": session.id, "observation": session.current.observation}


def _candidates(session: Session) -> list[str]:
    return list(cast(Wordle, session.game).candidates())


def _detail(session: Session) -> dict[str, Any]:
    return {**detail_fields(session), "seed": session.item, "reward": session.total_reward}


SPEC = EnvironmentSpec(
    name="wordle",
    health="This is environment LMRL-Gym.",
    family="id",
    prefix="/wordle",
    item_field="seed",
    new_game=Wordle,
    items=items,
    instruction=INSTRUCTION,
    oracle=oracle,
    cheap=True,
    answers_when_done=False,
    reset_answer=_started,
    detail_answer=_detail,
    routes=(SessionRoute("/filtered_vocab", _candidates),),
)
