"""Wordle, served as AgentGym's `wordle` under /wordle."""

from typing import Any, cast

from envs.game import EnvironmentSpec, Session, SessionRoute, detail_fields
from envs.wordle.game import Wordle, plausible_actions
from envs.wordle.oracle import oracle
from envs.wordle.tasks import items, vocabulary


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
    item_count=lambda: len(vocabulary()),
    oracle=oracle,
    plausible_actions=plausible_actions,
    cheap=True,
    answers_when_done=False,
    reset_answer=_started,
    detail_answer=_detail,
    routes=(SessionRoute("/filtered_vocab", _candidates),),
)
