"""Training on environments of other packages, from start to end."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_learning import ENVIRONMENT, RECIPES, ROOT, SETTINGS, SUPPORT

from envs.registry import UnknownEnvironment, load
from manus_jax.agentgym.environments import open_environments, register_adapted
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.config.binding import ConfigError
from manus_jax.evaluation.eval_sets import split_tasks

LESS = (
    "train.batch_size = 4",
    "train.total_steps = 2",
    "train.test_freq = 2",
    "train.save_freq = 2",
    "train.val_tasks = 8",
    "train.val_before_train = False",
    "train.baselines = ['random']",
    "warm_start.steps = 20",
    "warm_start.traces = 40",
    "warm_start.random_share = 1.0",
    "rollout.max_turns = 4",
    "rollout.max_total_tokens = 256",
    "data.max_length = 256",
    "scratch.vocab_size = 270",  # the same for all, so that they share compiled programs
)


def train(directory: Path, env: str, *more: str, scratch: bool = True) -> list[Mapping[str, Any]]:
    """Two updates, from scratch after a warm start by a random policy; the lines of metrics."""
    bindings = [*SETTINGS, *RECIPES["grpo"], *LESS, f"env.names = [{env!r}]", *more]
    if not scratch:
        bindings = [line for line in bindings if not line.startswith("scratch.")]
    (directory / "run.gin").write_text("\n".join([*bindings, "train.run_dir = 'run'"]) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "manus_jax.train", "--gin_file=run.gin"],
        cwd=directory,
        env={**ENVIRONMENT, "PYTHONPATH": f"{SUPPORT}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines][-2:] == [1, 2]
    assert all(line["rollout/failed"] == 0 for line in lines if "rollout/failed" in line)
    return lines


def test_a_gymnasium_environment_is_trained_on(tmp_path: Path) -> None:
    lines = train(tmp_path, "gym:FrozenLake-v1?is_slippery=False&desc=['SF','FG']")
    assert any(line["actor/grad_norm"] > 0 for line in lines[-2:])
    assert max(line["episode/reward/max"] for line in lines[-2:]) == 1.0


def test_a_game_of_textarena_is_won(tmp_path: Path) -> None:
    pytest.importorskip("textarena", reason="needs the extra 'textarena'")
    name = "gym:GuessTheNumber-v0"
    register_adapted(name)
    with open_environments({name: "embedded"}) as pool, pool.lease(name) as session:
        assert "between 1 and 20" in session.reset(3)
        low, high, done = 1, 20, False
        while not done:
            result = session.step(f"I say [{(low + high) // 2}].")
            if "higher" in result.observation:
                low = (low + high) // 2 + 1
            elif "lower" in result.observation:
                high = (low + high) // 2 - 1
            done = result.done
        assert (session.episode_reward, session.success) == (1.0, True)
        assert "Congratulations" in result.observation
    with pytest.raises(Exception, match="number of players has to be 2"):
        load("gym:TicTacToe-v0")


def test_a_game_of_textarena_depends_on_its_item_and_actions_only() -> None:
    pytest.importorskip("textarena", reason="needs the extra 'textarena'")
    spec = load("gym:2048-v0")  # where the numbers appear is random, in every turn
    moves = ("[left]", "[up]", "[right]", "[down]")
    random.seed(1)
    expected = random.random()
    random.seed(1)
    alone, one, other = (spec.new_game() for _ in range(3))
    played = [alone.reset(3)] + [alone.step(move).observation for move in moves]
    assert len({*played}) == len(played)
    interleaved = [one.reset(3)]
    other.reset(4)
    for move in moves:
        interleaved.append(one.step(move).observation)
        other.step(move)
    assert interleaved == played
    assert random.random() == expected  # of this process


MCP = f"mcp:{sys.executable} {SUPPORT / 'mcp_tools.py'}"


def test_the_tools_of_an_mcp_server_are_actions() -> None:
    pytest.importorskip("mcp", reason="needs the extra 'mcp'")
    register_adapted(MCP)
    with open_environments({MCP: "embedded"}) as pool, pool.lease(MCP) as session:
        assert "add_number(number, note): Adds a number to the total." in session.reset(0)
        call = 'Action: add_number with Action Input: {"number": 2}'
        assert session.step(call).observation == "Observation: 2\nGive me one action."
        assert session.step(call).observation.startswith("Observation: 4\n")  # it has a state
        wrong = session.step('Action: divide with Action Input: {"by": 0}')
        assert wrong.observation.startswith("Observation: Error: ") and not wrong.done
        assert "no tool 'sing'" in session.step("Action: sing with Action Input: {}").observation
        assert session.step("I sing.").observation.startswith("Format error")
        assert session.step('Action: finish with Action Input: {"answer": "4"}').done
        session.reset(1)
        called = PROMPTS[MCP].tools[0].command({"number": 3})  # by a model with native tools
        assert session.step(called).observation.startswith("Observation: 3\n")  # of its own
    with pytest.raises(UnknownEnvironment, match="there is no program 'no-such-server'"):
        load("mcp:no-such-server --fast")
    with pytest.raises(UnknownEnvironment, match="the server does not start"):
        load(f"mcp:{sys.executable} -c pass")
    with pytest.raises(ConfigError, match=r"list them with their prompts in data.train_files"):
        split_tasks(MCP, "train", 3)


def test_an_mcp_server_is_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the extra 'mcp'")
    for split, items in {"train": range(8), "test": range(8, 10)}.items():
        rows = [
            {"item_id": n, "data_source": MCP, "prompt": "Add 1.", "ground_truth": "1"}
            for n in items
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    lines = train(
        tmp_path,
        MCP,
        "import mcp_tools",
        "data.train_files = ['train.jsonl']",
        "data.val_files = ['test.jsonl']",
        "algorithm.reward = 'adds'",
        "rollout.prompt_source = 'dataset'",
        "rollout.max_turns = 1",
        "rollout.max_tokens_per_turn = 32",
        "scratch.vocab_size = 400",
        "warm_start.traces = 4",  # every episode starts a server
        "train.group_size = 2",
        "warm_start.batch_size = 4",
        "train.val_tasks = 1",
        "train.baselines = []",
        "train.batch_size = 2",
    )
    assert "reward/adds" in lines[-1]


OPENENV_PYTHON = os.environ.get("MANUS_JAX_OPENENV_PYTHON")
needs_openenv = pytest.mark.skipif(
    not OPENENV_PYTHON, reason="MANUS_JAX_OPENENV_PYTHON has no interpreter with openenv-core"
)


@pytest.fixture(scope="module")
def levers() -> Iterator[str]:
    """The name of an environment on a real OpenEnv server."""
    command = [str(OPENENV_PYTHON), str(SUPPORT / "openenv_server.py")]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        try:
            yield f"openenv:{process.stdout.readline().split()[1]}"
        finally:
            process.terminate()


@needs_openenv
def test_an_openenv_server_is_played(levers: str) -> None:
    register_adapted(levers)
    assert PROMPTS[levers].actions == ("one", "two", "three")
    with open_environments({levers: "embedded"}) as pool, pool.lease(levers) as session:
        assert session.reset(7) == "Which lever of 7?"
        first = session.step("two")
        assert (first.observation, first.reward, first.done) == ("It pays.", 0.5, False)
        refused = session.step("nine")
        assert refused.observation.startswith("This is not an action") and not refused.done
        assert session.step("two").done
        assert (session.episode_reward, session.success) == (1.0, True)
    with pytest.raises(UnknownEnvironment, match="is not an OpenEnv server"):
        load("openenv:http://127.0.0.1:9")


@needs_openenv
def test_an_openenv_server_is_trained_on(levers: str, tmp_path: Path) -> None:
    # Random numbers depend on the name, which has the server's port: enough episodes for any.
    lines = train(tmp_path, levers, "warm_start.steps = 60", "train.batch_size = 8")
    assert any(line["actor/grad_norm"] > 0 for line in lines[-2:])
    assert max(line["episode/reward/max"] for line in lines[-2:]) > 0
