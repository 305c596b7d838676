"""The client against the project's own servers: an oracle wins over HTTP as it does in process."""

import functools
import importlib.util
import math

import pytest
from retried import played

from envs.registry import ENVIRONMENTS as EMBEDDED
from envs.registry import load
from manus_jax.agentgym.client import Session
from manus_jax.agentgym.environments import open_environments
from manus_jax.agentgym.table import ENVIRONMENTS

NAMES = sorted(EMBEDDED)


def test_every_embedded_environment_is_in_the_table() -> None:
    assert set(EMBEDDED) <= set(ENVIRONMENTS)


@pytest.mark.bug("B2")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.java) if name == "sciworld" else name for name in NAMES],
)
def test_the_oracle_wins_over_http(name: str) -> None:
    if importlib.util.find_spec(EMBEDDED[name].partition(":")[0]) is None:
        pytest.skip(f"{name} is not installed")
    spec, row = load(name), ENVIRONMENTS[name]
    missing = spec.requirements()
    if missing:
        pytest.skip(missing)
    assert (spec.family, spec.item_field, spec.prefix) == (row.id_field, row.item_field, row.prefix)
    assert spec.oracle is not None

    def episode(item: int, session: Session) -> tuple[float, bool, float]:
        assert spec.oracle is not None
        policy = spec.oracle(item)
        view = session.reset(item)
        rewards = []
        while True:
            move = policy(view)
            result = session.step(move.action)
            view = result.observation
            rewards.append(result.reward)
            if result.done:
                return session.episode_reward, session.success, math.fsum(rewards)

    with open_environments({name: "embedded"}) as pool:
        for item in (spec.items("train")[0], spec.items("train")[3]):
            reward, success, total = played(pool, name, functools.partial(episode, item))
            assert success
            assert 0 < reward <= 1
            assert total == pytest.approx(reward)
        assert pool.counters() == {f"{name}/leases": 2}
