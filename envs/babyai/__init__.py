"""BabyAI: rooms, objects and doors on a grid, served as AgentGym's `babyai`."""

from typing import Any, cast

from envs.babyai.game import BabyAIGame, plausible_actions
from envs.babyai.levels import LEVELS, SEEDS, items
from envs.babyai.oracle import oracle
from envs.babyai.picture import data_uri
from envs.game import EnvironmentSpec, Session, SessionRoute, step_fields


def _stepped(session: Session) -> dict[str, Any]:
    return {**step_fields(session), "score": session.total_reward}


def _started(session: Session) -> dict[str, Any]:
    return {**_stepped(session), "deleted": False}


def _picture(session: Session) -> str:
    return data_uri(cast(BabyAIGame, session.game).level)


SPEC = EnvironmentSpec(
    name="babyai",
    health="This is environment BabyAI.",
    family="id",
    item_field="data_idx",
    new_game=BabyAIGame,
    items=items,
    item_count=lambda: len(LEVELS) * SEEDS,
    oracle=oracle,
    plausible_actions=plausible_actions,
    answers_when_done=False,
    reset_answer=_started,
    step_answer=_stepped,
    observation_answer=_started,
    routes=(SessionRoute("/render", _picture, "POST"),),
)
