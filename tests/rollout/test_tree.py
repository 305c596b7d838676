"""Trees of episodes: where they branch, that the tokens are exact, and that a replay is checked."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
from made_trajectories import made, segment
from scripted_engine import ScriptedEngine, spec_of

from manus_jax.agentgym.client import StepResult
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.protocol import Request
from manus_jax.errors import UserError
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.strategies import check_strategy, episodes_per_spec
from manus_jax.rollout.strategies.tree import branching_turns
from manus_jax.rollout.trajectory import FailedEpisode, Trajectory
from manus_jax.rollout.trajectory_files import read_trajectories, write_trajectories

EngineOf = Callable[..., ScriptedEngine]
MOVES = ("move up", "move down", "move left", "move right")


def tree_settings(parameters: dict, **changes: object) -> RolloutSettings:
    usual = {"prompt_layout": "acknowledged", "max_total_tokens": 8192, "max_turns": 4}
    return RolloutSettings(strategy="tree", strategy_parameters=parameters, **{**usual, **changes})


def by_seed(request: Request, observation: str) -> str:
    """An action and a thought that depend on the request's seed, as samples do."""
    return f"Thought: {'so ' * (request.seed % 3)}\nAction:\n{MOVES[request.seed % 4]}"


def played(engine: ScriptedEngine, pool: EnvironmentPool, settings, item: str = "maze_3"):
    agent = EngineAgent(engine, engine.tokenizer, seed=1)
    return run_episodes([spec_of(item)], agent, pool, settings)


TWO_TURNS = {"branch_at": "turns", "turns": [1, 3], "width": 3}


@pytest.mark.parametrize("memory", [None, 1])
def test_branches_continue_the_exact_tokens_of_the_trunk_and_train_only_their_own(
    engine_of: EngineOf, pool: EnvironmentPool, memory: int | None
) -> None:
    engine = engine_of(by_seed)
    settings = tree_settings(TWO_TURNS, memory_turns=memory)
    assert episodes_per_spec(settings) == 5
    trunk, *branches = played(engine, pool, settings)
    assert trunk.parent is None and trunk.uid == "maze_3#0"
    uids = ["maze_3#0^1.1", "maze_3#0^1.2", "maze_3#0^3.1", "maze_3#0^3.2"]
    assert [b.uid for b in branches] == uids
    assert [(b.parent, b.branch_turn) for b in branches] == [("maze_3#0", 1)] * 2 + [
        ("maze_3#0", 3)
    ] * 2
    assert {b.group_id for b in branches} == {trunk.group_id}
    # The same trunk is played without branches.
    plain = dataclasses.replace(settings, strategy="episode", strategy_parameters={})
    (alone,) = played(engine_of(by_seed), pool, plain)
    assert [t.text for t in alone.turns] == [t.text for t in trunk.turns]
    for branch in branches:
        first = branch.branch_turn
        replaced = trunk.turns[first]
        prompt = trunk.segments[replaced.segment].token_ids[: replaced.start]
        own = branch.segments[0]
        assert own.token_ids[: len(prompt)].tolist() == prompt.tolist()
        assert not own.loss_mask[: len(prompt)].any() and own.loss_mask[len(prompt)]
        assert [t.text for t in branch.turns[:first]] == [t.text for t in trunk.turns[:first]]
        assert branch.turns[first].start == len(prompt)
        sampled = list(itertools.chain(*(s.turn_ids[s.loss_mask] for s in branch.segments)))
        assert set(sampled) == set(range(first, len(branch.turns)))
        assert branch.agent_tokens == len(sampled)
        prompts = {request.session: request.prompt_ids for request in engine.requests}
        last = branch.turns[-1]
        session = f"{branch.uid}/1/{last.segment}"
        ids = branch.segments[last.segment].token_ids[: last.start]
        assert list(prompts[session]) == ids.tolist()
    trained = [s.loss_mask.sum() for t in (trunk, *branches) for s in t.segments]
    own_samples = sum(len(made.token_ids) for made in engine.generations)
    assert sum(trained) == own_samples, "every sampled token is trained once"
    assert not engine.open_sessions


def test_a_tree_is_the_same_when_read_from_its_file(
    engine_of: EngineOf, pool: EnvironmentPool, tmp_path
) -> None:
    outcomes = played(engine_of(by_seed), pool, tree_settings(TWO_TURNS))
    path = write_trajectories(tmp_path, 1, outcomes)
    for read, wrote in zip(read_trajectories(path), outcomes, strict=True):
        assert (read.parent, read.branch_turn) == (wrote.parent, wrote.branch_turn)
        for new, old in zip(read.segments, wrote.segments, strict=True):
            for name in ("token_ids", "loss_mask", "log_probs", "versions", "turn_ids"):
                np.testing.assert_array_equal(getattr(new, name), getattr(old, name))


def trunk_of(log_probs, actions, success=False) -> Trajectory:
    """One turn of two tokens per log-prob; `actions` has an x for a turn without an action."""
    parts = [part for turn in range(len(log_probs)) for part in ((None, 1), (turn, 2))]
    one = segment(parts)
    values = one.log_probs.copy()
    for turn, log_prob in enumerate(log_probs):
        values[one.turn_ids == turn] = log_prob
    made_up = made([dataclasses.replace(one, log_probs=values)], [0.0] * len(log_probs))
    turns = [
        dataclasses.replace(turn, action=None if kind == "x" else "move up")
        for turn, kind in zip(made_up.turns, actions, strict=True)
    ]
    return dataclasses.replace(made_up, turns=tuple(turns), success=success)


@pytest.mark.parametrize(
    ("branch_at", "points", "expected"),
    [
        ("entropy", 1, [2]),
        ("entropy", 2, [0, 2]),
        ("failure", 1, [1]),  # the first turn without an action
        ("failure", 2, [1, 3]),
        ("failure", 3, [1, 2, 3]),  # and the middle of the episode
    ],
)
def test_branching_turns(branch_at: str, points: int, expected: list[int]) -> None:
    trunk = trunk_of([-0.5, -0.1, -2.0, -0.2], "oxox")
    assert branching_turns(trunk, branch_at, (), points) == expected
    if branch_at == "failure":
        assert branching_turns(dataclasses.replace(trunk, success=True), "failure", (), 2) == []


def test_turns_that_the_trunk_does_not_reach_do_not_branch() -> None:
    assert branching_turns(trunk_of([-0.5, -0.1], "oo"), "turns", [5, 1, 2], 1) == [1]


class DriftingPool:
    """A pool whose sessions answer from their second step on with the time of day."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool, self._clock = pool, itertools.count()
        self.settings, self.environments = pool.settings, pool.environments

    @contextlib.contextmanager
    def lease(self, env: str, deadline: Callable[[], float]):
        with self._pool.lease(env, deadline) as session:
            steps, true_step = itertools.count(), session.step

            def step(action: str) -> StepResult:
                result = true_step(action)
                if not next(steps):
                    return result
                return dataclasses.replace(result, observation=f"It is {next(self._clock)}.")

            session.step = step
            try:
                yield session
            finally:
                del session.step


def test_an_environment_that_is_not_deterministic_scores_nothing_and_the_turn_is_reported(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    settings = tree_settings(TWO_TURNS)
    (failed,) = played(engine_of(by_seed), DriftingPool(pool), settings)
    assert isinstance(failed, FailedEpisode) and failed.kind == "not_deterministic"
    assert re.fullmatch(
        r"maze_3 is not deterministic: the answer to turn 1 was 'It is \d\.' and is 'It is \d\.' "
        "when the same actions are replayed",
        failed.error,
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"width": 1}, "width = 1 continuations of a turn"),
        ({"branch_at": "turns"}, "turns = () must be a list of turns, counted from 0"),
        ({"branch_at": "turns", "turns": [-1]}, "turns = [-1] must be a list of turns"),
        *(
            ({"branch_at": "turns", "turns": turns}, "must be Sequence[int]")
            for turns in (3, None, {1: 2}, "12", [1.5], ["1"], [True])
        ),
        ({"branch_at": "turns", "turns": [1, 1]}, "turns are listed once each"),
        ({"branch_at": "turns", "turns": [1], "points": 2}, "points is for the other choices"),
        ({"turns": [1]}, "branch_at = 'entropy' chooses the turns itself"),
        ({"points": 0}, "set points to 1 or more"),
        ({"points": 500, "width": 4}, "a tree of 1501 episodes: 1000 at most"),
        ({"branch_at": "best"}, "branch_at = 'best' must be"),
    ],
)
def test_a_tree_that_makes_no_sense_is_one_line(parameters: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        check_strategy(tree_settings(parameters))
    assert "\n" not in str(raised.value)


def test_an_environment_with_lasting_effects_is_refused() -> None:
    check_strategy(tree_settings({}), ["maze", "babyai"])
    with pytest.raises(UserError, match="actions in webarena have effects that last"):
        check_strategy(tree_settings({}), ["maze", "webarena"])
