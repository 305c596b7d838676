"""Environments in interpreters of their own: scripts/setup_env.sh, env.python and --env_python."""

import os
import subprocess
from pathlib import Path

import pytest

from manus_jax.agentgym.environments import (
    check_interpreters,
    open_environments,
    register_adapted,
)
from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import EnvSettings
from manus_jax.servers.processes import ServerSetupError

ROOT = Path(__file__).parents[2]


def setup_env(cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(ROOT / "scripts/setup_env.sh"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory) -> Path:
    """An interpreter with the packages of a server and nothing of the trainer."""
    folder = tmp_path_factory.mktemp("project")
    done = setup_env(folder, "alfworld", "--install", "iniconfig")
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'env.python = {"alfworld": "venvs/alfworld/bin/python"}\n'
    return folder / "venvs/alfworld/bin/python"


def importable(python: Path, *modules: str) -> list[str]:
    tests = [[str(python), "-c", f"import {module}"] for module in modules]
    done = [subprocess.run(test, capture_output=True).returncode for test in tests]
    return [module for module, code in zip(modules, done, strict=True) if code == 0]


def test_an_environment_is_played_on_a_server_of_another_interpreter(interpreter: Path) -> None:
    assert importable(interpreter, "jax", "uvicorn", "iniconfig") == ["uvicorn", "iniconfig"]
    check_interpreters({"alfworld": str(interpreter)})
    chosen = {"alfworld": str(interpreter)}
    with (
        open_environments({"alfworld": "embedded"}, interpreters=chosen) as pool,
        pool.lease("alfworld") as session,
    ):
        assert "Your task is to: " in session.reset(0)
        assert session.step("look").observation.startswith("You are in the middle of a room.")


def test_an_interpreter_that_cannot_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerSetupError, match=r"env.python: none/python cannot serve maze: .*No "):
        check_interpreters({"maze": "none/python"})
    bare = tmp_path / "bare"
    subprocess.run(["python3", "-m", "venv", "--without-pip", str(bare)], check=True)
    with pytest.raises(ServerSetupError, match=r"No module named 'fastapi'; `scripts/setup_env.sh"):
        check_interpreters({"maze": str(bare / "bin/python")})
    with pytest.raises(ConfigError, match=r"env.python has \['maze'\], but this run starts"):
        EnvSettings(names=("wordle",), python={"maze": "python"})
    lake = "gym:FrozenLake-v1"
    EnvSettings(names=(lake,), python={"gym": "python"})
    register_adapted(lake)
    with (
        pytest.raises(FileNotFoundError, match="none/python"),
        open_environments({lake: "embedded"}, interpreters={"gym": "none/python"}),
    ):
        pass


def test_the_train_scripts_use_the_interpreter_of_the_environment(
    interpreter: Path, tmp_path: Path
) -> None:
    """The trainer is replaced by a program that stops at once; the servers are real."""
    trainer = tmp_path / "python"
    trainer.write_text(
        '#!/bin/sh\nfor x in "$@"; do [ "$x" = manus_jax.train ] && ps -efww && exit 0; done\n'
        'exec python "$@"\n'
    )
    trainer.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts/train_grpo.sh"), "--env_name", "alfworld", "--base_port", "47311"],
        cwd=interpreter.parents[3],
        env={**os.environ, "PYTHON": str(trainer), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "venvs/alfworld/bin/python -m envs.serve alfworld --port 47311" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a/b"], "NAME must be the name of an environment, not 'a/b'"),
        (["maze", "gym"], "unknown argument 'gym'"),
        (["maze", "--install"], "--install needs at least one requirement"),
    ],
)
def test_wrong_arguments_of_setup_env_are_one_line(tmp_path, arguments, message) -> None:
    done = setup_env(tmp_path, *arguments)
    assert done.returncode == 2 and done.stderr == f"setup_env.sh: {message}" + (
        "; see --help\n" if "unknown" in message else "\n"
    )
    assert not list(tmp_path.iterdir())
