"""Environments of other packages over AgentGym's protocol, as training plays them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest

from envs.game import GameError
from envs.registry import UnknownEnvironment, load
from manus_jax.agentgym.environments import (
    check_interpreters,
    open_environments,
    register_adapted,
)
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import environment
from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import read_train_config
from manus_jax.servers.processes import ServerSetupError
from manus_jax.training.build import open_trainer
from manus_jax.training.job import Job

LAKE = "gym:FrozenLake-v1?is_slippery=False"


def test_a_gymnasium_environment_is_played_to_its_goal_with_the_same_numbers() -> None:
    register_adapted(LAKE)
    direct = gymnasium.make("FrozenLake-v1", is_slippery=False)
    state, _ = direct.reset(seed=3)
    with open_environments({LAKE: "embedded"}) as pool, pool.lease(LAKE) as session:
        seen = session.reset(3)
        assert seen.startswith(f"{state}\n[S]FFF\n")
        rejected = session.step("1.7")
        assert "is not an action" in rejected.observation and not rejected.done
        for action in (1, 1, 2, 2, 1, 2):
            state, reward, done, *_ = direct.step(action)
            result = session.step(str(action))
            assert (result.observation.split("\n")[0], result.done) == (str(state), done)
        assert (session.episode_reward, session.success, reward) == (1.0, True, 1)
        session.reset(3)
        assert session.step("1").reward == 0.0  # the sum starts again
    prompt = PROMPTS[LAKE]
    assert "- 2: Move right" in prompt.instruction and prompt.actions == ("0", "1", "2", "3")


def test_rewards_are_sums_on_the_scale_of_the_threshold() -> None:
    register_adapted("gym:CartPole-v1")
    game = load("gym:CartPole-v1").new_game()
    assert len(game.reset(0).strip("[]").split(", ")) == 4
    values = [game.step("0").reward for _ in range(3)]
    assert values == [1.0, 2.0, 3.0]
    rule = environment("gym:CartPole-v1").reward
    assert rule.scaled(47.5) == 0.1 and rule.scaled(10**6) == 1.0
    game.close()


def test_an_environment_of_the_users_own_is_found_through_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_lakes.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv\n"
        "gymnasium.register('OwnLake-v0', FrozenLakeEnv, kwargs={'desc': ['SF', 'HG']})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    game = load("gym:own_lakes:OwnLake-v0?is_slippery=False").new_game()
    assert game.reset(0) == "0\n[S]F\nHG"
    game.step("2")
    assert (game.step("1").reward, game.observation().startswith("3\n")) == (1.0, True)
    game.close()


def test_actions_of_other_spaces_are_json() -> None:
    game = load("gym:Pendulum-v1").new_game()
    game.reset(0)
    assert "is not an action" in game.step("left").observation
    assert "is not an action" in game.step("[99.0]").observation
    before = game.observation()
    assert game.step("[0.5]").observation != before
    game.close()


OWN_SPACES = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, OneOf, Sequence, Text, Tuple

class Echo(gymnasium.Env):
    observation_space = Text(200)
    render_mode = None

    def __init__(self, action_space, **spaces):
        self.action_space = action_space
        vars(self).update(spaces)

    def reset(self, *, seed=None, options=None):
        space, self.seen = self.observation_space, "start"
        return ("start" if isinstance(space, Text) else space.sample()), {}

    def step(self, action):
        return repr(action), 0.0, False, False, {}

pixels = Dict(view=Box(0, 255, (64, 64, 3), np.uint8), speed=Discrete(3))
for name, spaces in {
    "Text": [Text(9)],
    "Scalar": [Box(-2, 2, ())],
    "Tuple": [Tuple([Discrete(2), Text(9)])],
    "Dict": [Dict(to=Discrete(3), by=Box(0, 9, (2,), np.uint8))],
    "Sequence": [Sequence(Discrete(3))],
    "OneOf": [Tuple([Discrete(2), OneOf([Discrete(2), Text(9)])])],
    "Pixels": [Discrete(2), pixels],
    "Many": [Discrete(2), Box(0, 1, (65,))],
}.items():
    given = dict(zip(["action_space", "observation_space"], spaces))
    make = lambda given=given, **more: Echo(**given)
    gymnasium.register(f"{name}-v0", make, disable_env_checker=True)
"""


@pytest.fixture
def own_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "own_spaces" not in sys.modules:  # a module registers its environments once
        (tmp_path / "own_spaces.py").write_text(OWN_SPACES)
        monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_spaces")
@pytest.mark.parametrize(
    ("space", "described", "actions", "refused"),
    [
        ("Text", "a text of 1 to 9 characters", {"up": "'up'"}, ["too long a text", '"up"']),
        ("Scalar", "a value of Box", {"1": "array(1.", "0.1": "array(0.1"}, ["3", "[1]", '"1"']),
        ("Tuple", "a value of Tuple", {'[1, "up"]': "(1, 'up')"}, ["1", "[1]", '[1.0, "up"]']),
        (
            *("Dict", "a value of Dict"),
            {'{"by": [1, 2], "to": 2}': "{'to': 2, 'by': array([1, 2], dtype=uint8)}"},
            ['{"to": 2}', '{"to": 3, "by": [1, 2]}', '{"to": 2, "by": [257, 2]}', "[]", "up"],
        ),
    ],
)
def test_actions_of_every_space_are_those_that_the_prompt_asks_for(
    space: str, described: str, actions: dict[str, str], refused: list[str]
) -> None:
    spec = load(f"gym:own_spaces:{space}-v0")
    assert spec.client is not None and spec.client.actions[0].startswith(described)
    game = spec.new_game()
    game.reset(0)
    for action, seen in actions.items():
        assert game.step(action).observation.startswith(seen)
    for action in refused:
        assert "is not an action; it must be" in game.step(action).observation
    game.close()


@pytest.mark.usefixtures("own_spaces")
@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ("Sequence", r"actions in Sequence\(Discrete\(3\), stack=False\) are not supported"),
        ("OneOf", r"actions in OneOf\(.*\) are not supported"),
        ("Pixels", "has images"),
        ("Many", "an observation has 65 numbers, more than 64"),
    ],
)
def test_a_space_that_cannot_be_played_in_text_is_found_before_anything_starts(
    space: str, problem: str
) -> None:
    with pytest.raises(UnknownEnvironment, match=f"gym:(own_spaces:)?{space}-v0.*{problem}"):
        load(f"gym:own_spaces:{space}-v0")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gym:NoSuchLake-v1", "NoSuchLake-v1"),
        ("gym:CliffWalking-v0", "Please use `CliffWalking-v1` instead"),
        ("gym:no_such_module:Lake-v0", "No module named 'no_such_module'"),
        ("gym:FrozenLake-v1?is_slipery=False", "is_slipery"),
        ("gym:FrozenLake-v1?map_name=7x7", "cannot be made: KeyError"),
        ("gym:", "names no environment: write gym:NAME"),
        ("verifiers: ", "names no environment"),
        ("mcp:", "names no environment"),
    ],
)
def test_an_environment_without_a_usable_name_is_one_line(name: str, problem: str) -> None:
    with pytest.raises(UnknownEnvironment, match=problem) as caught:
        register_adapted(name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "package", "problem"),
    [
        ("openenv:127.0.0.1:8000", "websockets", "write openenv:http://HOST:PORT"),
        ("openenv:file:///dev/zero", "websockets", "write openenv:http://HOST:PORT"),
        ("mcp:python 'tools.py", "mcp", "is not a command: No closing quotation"),
        ("mcp:true", "mcp", "the server does not start: (?!.*ExceptionGroup)"),
        ("mcp:python none.py", "mcp", "does not start: .*; it wrote: python: can't open file"),
    ],
)
def test_an_environment_that_cannot_be_reached_is_one_line(
    name: str, package: str, problem: str
) -> None:
    pytest.importorskip(package, reason=f"needs the package {package}")
    with pytest.raises(UnknownEnvironment, match=problem) as caught:
        register_adapted(name)
    assert len(str(caught.value).splitlines()) == 1


def test_an_interpreter_of_another_language_cannot_serve() -> None:
    for program in ("/bin/true", "/bin/false"):
        with pytest.raises(ServerSetupError, match=f"env.python: {program} cannot serve maze: it "):
            check_interpreters({"maze": program})


def test_an_item_that_is_no_seed_is_an_error_of_the_request() -> None:
    game = load(LAKE).new_game()
    with pytest.raises(GameError, match="a seed of 0 or more"):
        game.reset(-1)


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UnknownEnvironment, match=r"pip install 'manus-jax\[textarena\]'"):
        load("gym:GuessTheNumber-v0-hardcore")
    with pytest.raises(UnknownEnvironment, match=r"pip install 'manus-jax\[mcp\]'"):
        load("mcp:python tools.py")


def test_a_version_of_verifiers_without_such_environments_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(__version__="0.4.0"))
    problem = load("verifiers:echo").requirements()
    assert problem is not None and "needs verifiers 0.1, and 0.4.0 is installed" in problem


def test_a_warm_start_without_an_oracle_needs_random_episodes_only() -> None:
    config = read_train_config(
        [],
        [
            f"env.names = [{LAKE!r}]",
            "train.run_dir = 'runs/x'",
            "warm_start.steps = 5",
            "data.max_length = 4096",
        ],
    )
    with (
        pytest.raises(ConfigError, match=r"has no oracle.*warm_start\.random_share = 1"),
        open_trainer(config, "", Job()),
    ):
        pass
