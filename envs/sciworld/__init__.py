"""ScienceWorld: experiments in a simulated house, served as AgentGym's `sciworld`."""

from typing import Any, cast

from envs.game import (
    EnvironmentSpec,
    GameError,
    Move,
    Policy,
    Session,
    SessionRoute,
    StepRoute,
)
from envs.sciworld.game import SciWorld
from envs.sciworld.simulators import POOL, gold_path, limit, missing
from envs.sciworld.tasks import ITEMS, items, pair


def oracle(item: int) -> Policy:
    """A policy that follows ScienceWorld's gold path."""
    task, variation = pair(item)
    simulator = POOL.lease()
    try:
        path = iter(gold_path(simulator, task.name, variation))
    finally:
        POOL.give_back(simulator)

    def policy(_: str) -> Move:
        action = next(path, "look around")
        return Move("This is the next step of the experiment.", action)

    return policy


def _game(session: Session) -> SciWorld:
    return cast(SciWorld, session.game)


def _score(session: Session) -> int:
    return int(session.current.info.get("score", 0))


def _stepped(session: Session) -> dict[str, Any]:
    step = session.current
    return {
        "observation": step.observation,
        "reward": step.reward,
        "score": _score(session),
        "done": step.done,
    }


def _started(session: Session) -> dict[str, Any]:
    game = _game(session)
    return {
        "task_name": game.task.name,
        "var_num": game.variation,
        "task_description": game.description,
        **_stepped(session),
        "deleted": False,
    }


def _action_hint(session: Session) -> dict[str, Any]:
    return _game(session).query(
        lambda simulator: {
            "possible_actions": simulator.get_possible_actions(),
            "possible_objects": simulator.get_possible_objects(),
        }
    )


def _valid_actions(session: Session) -> list[str]:
    valid = _game(session).query(lambda simulator: simulator.get_valid_action_object_combinations())
    return list(valid)


def _goals(session: Session) -> dict[str, Any]:
    return {"goals": _game(session).query(lambda simulator: simulator.get_goal_progress())}


def _object_tree(session: Session) -> dict[str, Any]:
    return {"object_tree": _game(session).query(lambda simulator: simulator.getObjectTree())}


def _state(session: Session) -> dict[str, Any]:
    return _game(session).query(
        lambda simulator: {
            "observation": simulator.look(),
            "inventory": simulator.inventory(),
            "task_description": simulator.get_task_description(),
            "goal_progress": simulator.get_goal_progress(),
            "possible_actions": simulator.get_possible_actions()[:10],
            "possible_objects": simulator.get_possible_objects()[:10],
            "current_moves": simulator.get_num_moves(),
            "environment_info": _started(session),
        }
    )


def _action_in(text: str) -> str:
    """The text after "Action:", or the whole text without one."""
    parts = text.removesuffix("</s>").split("Action:")
    return parts[1].strip() if len(parts) > 1 else parts[0]


def _watched(session: Session) -> dict[str, Any]:
    """The outcome of a step with extra data for viewers, which costs many times the step itself."""
    step, game = session.current, _game(session)

    def look(simulator: Any) -> dict[str, Any]:
        seen = {
            "moves": simulator.get_num_moves(),
            "score": _score(session),
            "reward": step.reward,
            "look": simulator.look(),
            "inv": simulator.inventory(),
            "taskDesc": simulator.taskdescription(),
            "valid": list(simulator.get_valid_action_object_combinations()),
            "variationIdx": game.variation,
            "taskName": game.task.name,
            "simplificationStr": simulator.simplificationStr,
        }
        return {
            **_stepped(session),
            "info": seen,
            "object_tree": simulator.getObjectTree(),
            "inventory": seen["inv"],
            "moves": seen["moves"],
        }

    return game.query(look)


def _task_description(session: Session) -> dict[str, str]:
    if session.last is None:
        raise GameError("The game has not been reset: call reset with a data_idx first.")
    return {"task_description": _game(session).description}


SPEC = EnvironmentSpec(
    name="sciworld",
    health="This is environment ScienceWorld.",
    family="id",
    item_field="data_idx",
    new_game=SciWorld,
    items=items,
    item_count=lambda: ITEMS,
    oracle=oracle,
    reset_answer=_started,
    step_answer=_stepped,
    detail_answer=_started,
    routes=(
        SessionRoute("/action_hint", _action_hint),
        SessionRoute("/valid_actions", _valid_actions),
        SessionRoute("/goals", _goals),
        SessionRoute("/task_description", _task_description),
        SessionRoute("/object_tree", _object_tree),
        SessionRoute("/state", _state),
        StepRoute("/step_visual", _action_in, _watched),
    ),
    max_sessions=limit(),
    requirements=missing,
)
