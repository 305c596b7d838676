"""Programs with real packages: training with `openai`, and an agent of the framework openai-agents.

The programs are those of docs/agents.md.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_templates import QWEN25, tokenizer_with
from guide_examples import examples_for
from scripted_engine import ScriptedEngine, spec_of
from test_learning import ENVIRONMENT, RECIPES, ROOT, SETTINGS, SUPPORT

from envs.registry import load
from manus_jax.agentgym.environments import open_environments
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.protocol import Request
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.trajectory import Trajectory

EXAMPLES = examples_for(__file__, "docs/agents.md")
AGENT, BINDINGS, CONVERSING_AGENT, FRAMEWORK_AGENT = EXAMPLES


def write(program: str, directory: Path) -> None:
    """Writes an example to the file that its first line names."""
    (directory / program.partition("\n")[0].removeprefix("# ")).write_text(program)


def train(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Trains on levers with a program of the page, as a user in that directory does."""
    write(AGENT, directory)
    write(CONVERSING_AGENT, directory)
    bindings = (*SETTINGS, *RECIPES["grpo"], "train.run_dir = 'run'", *more)
    config = "import lever_env\n" + BINDINGS + "\n".join(bindings) + "\n"
    (directory / "levers.gin").write_text(config)
    return subprocess.run(
        [sys.executable, "-m", "manus_jax.train", "--gin_file=levers.gin"],
        cwd=directory,
        env={**ENVIRONMENT, "PYTHONPATH": f"{SUPPORT}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("module", "package"),
    [("my_agent", "openai"), ("my_conversing_agent", "agents")],
    ids=["openai", "openai-agents"],
)
def test_a_program_with_a_real_package_learns(tmp_path: Path, module: str, package: str) -> None:
    pytest.importorskip(package, reason=f"needs {package}: pip install openai openai-agents")
    less = ("train.total_steps = 11", "train.test_freq = 11", "train.val_tasks = 4")
    program = f"rollout.strategy_parameters = {{'function': '{module}:play'}}"
    done = train(tmp_path, *less, program, "optimizer.lr = 0.005")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rewards = [line["episode/reward/mean"] for line in lines[1:]]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.12
    assert all(line["rollout/failed"] == 0 for line in lines[1:])


def test_a_run_whose_program_never_calls_the_model_ends_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("def play(task):\n    return 1.0\n")
    parameters = "rollout.strategy_parameters = {'function': 'idle:play', 'reward': 'result'}"
    less = ("warm_start.steps = 1", "warm_start.traces = 9", "train.val_before_train = False")
    done = train(tmp_path, parameters, "train.max_bad_updates = 1", *less)
    assert done.returncode == 2, done.stderr
    assert "it must call the endpoint" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def moves(item: int) -> Any:
    """Calls the tool `move` as the oracle would, until the game is over."""
    policy = load("maze").oracle(item)

    def script(request: Request, seen: str) -> str:
        text = tokenizer_with(QWEN25).decode(list(request.prompt_ids))
        if "The game is over." in text:
            return "I have won."
        position = text.rpartition("The goal is at")[2].partition("<|im_end|>")[0]
        direction = policy(f"The goal is at{position}").action.removeprefix("move ")
        call = {"name": "move", "arguments": {"direction": direction}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    return script


def test_an_agent_of_a_framework_plays_with_its_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("agents", reason="needs the package openai-agents")
    write(FRAMEWORK_AGENT, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = dataclasses.replace(
        RolloutSettings(max_turns=40, max_total_tokens=16_384, max_tokens_per_turn=600),
        strategy="program",
        strategy_parameters={"function": "my_framework_agent:play"},
    )
    engine = ScriptedEngine(tokenizer_with(QWEN25), moves(3), max_length=16_384)
    agent = EngineAgent(engine, engine.tokenizer)
    with open_environments({"maze": "embedded"}) as pool:
        [won] = run_episodes([spec_of("maze_3")], agent, pool, settings)
    agent.close()
    engine.close()
    assert isinstance(won, Trajectory), won
    assert (won.env_reward, won.success, won.turns[-1].text) == (1.0, True, "I have won.")
    [segment] = won.segments  # all of its turns and tool results are one sequence
    sampled = [token for made in engine.generations for token in made.token_ids]
    assert segment.token_ids[segment.loss_mask].tolist() == sampled
    assert won.turns[0].action is not None and won.turns[0].action.startswith("move ")
