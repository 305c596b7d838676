"""An environment outside the project is served and played like a built-in one."""

import sys

import pytest

from envs import registry
from envs.registry import UnknownEnvironment
from manus_jax.agentgym import prompts, table
from manus_jax.agentgym.environments import open_environments, register_environment
from manus_jax.agentgym.prompts import EnvironmentPrompt
from manus_jax.agentgym.rewards import RewardKind, RewardRule
from manus_jax.agentgym.table import EnvironmentRow

GAME = '''
from envs.game import EnvironmentSpec, GameError, Step, fixed_splits


class Doubling:
    """Double the number that the item is."""

    def reset(self, item):
        self.item = item
        return f"What is twice {item}?"

    def step(self, action):
        right = action.strip() == str(2 * self.item)
        return Step("Right." if right else "No.", float(right), True)

    def observation(self):
        return f"What is twice {self.item}?"

    def close(self):
        pass


SPEC = EnvironmentSpec(
    name="doubling",
    health="This is environment Doubling.",
    family="id",
    item_field="data_idx",
    new_game=Doubling,
    items=fixed_splits(range(80), range(80, 100)),
    cheap=True,
)
NOT_A_SPEC = 7
'''
ROW = EnvironmentRow("doubling", "id", 36001, "data_idx", RewardRule(RewardKind.FINAL), "line")
PROMPT = EnvironmentPrompt("Double a number.", ("the number",), ())


KNOWN = (prompts.PROMPTS, registry.ENVIRONMENTS)


@pytest.fixture
def doubling(tmp_path, monkeypatch):
    """A module `doubling_game` that this process and its children can import."""
    (tmp_path / "doubling_game.py").write_text(GAME)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with table.ENVIRONMENTS.restored():
        yield
    for known in KNOWN:
        known.pop("doubling", None)
    sys.modules.pop("doubling_game", None)


def test_it_is_started_and_played_by_its_name(doubling):
    register_environment(ROW, PROMPT, "doubling_game:SPEC")
    with open_environments({"doubling": "embedded"}) as pool, pool.lease("doubling") as session:
        assert session.reset(21) == "What is twice 21?"
        result = session.step("42")
    assert (result.observation, result.reward, result.done) == ("Right.", 1.0, True)


def test_without_a_spec_it_is_played_on_given_servers_alone(doubling):
    register_environment(ROW, PROMPT)
    assert table.environment("doubling") is ROW
    with (
        pytest.raises(ValueError, match="'doubling' has no embedded server"),
        open_environments({"doubling": "embedded"}),
    ):
        pass


def test_a_name_is_given_once_and_a_place_has_two_parts(doubling):
    with pytest.raises(ValueError, match=r"doubling: spec 'doubling_game' must have the form"):
        register_environment(ROW, PROMPT, "doubling_game")
    register_environment(ROW, PROMPT)
    with pytest.raises(ValueError, match="the environment 'doubling' is already registered"):
        register_environment(ROW, PROMPT)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere.at_all:SPEC", r"no module 'nowhere' for the environment"),
        ("doubling_game:SPECK", r"'doubling_game' has no EnvironmentSpec 'SPECK'"),
        ("doubling_game:NOT_A_SPEC", r"has no EnvironmentSpec 'NOT_A_SPEC'"),
    ],
)
def test_a_location_without_a_spec_is_an_error_that_names_it(doubling, place, message):
    with pytest.raises(UnknownEnvironment, match=message):
        registry.load(place)
