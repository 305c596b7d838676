"""The pre-commit hooks use tools that the test extra installs, and CI runs the same checks."""

import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
(LOCAL,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


@pytest.mark.parametrize("hook", LOCAL["hooks"], ids=lambda hook: hook["id"])
def test_a_hook_runs_an_installed_command(hook):
    command = shlex.split(hook["entry"])[0]
    beside_python = Path(sys.executable).with_name(command)
    assert beside_python.exists() or shutil.which(command)
    assert hook["language"] == "system"  # pre-commit installs nothing for it
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(requirement.startswith(command) for requirement in extras["test"])


def test_the_hooks_are_local_so_that_nothing_is_downloaded():
    assert LOCAL["repo"] == "local"
    assert {"ruff", "ruff-format", "mypy"} <= {hook["id"] for hook in LOCAL["hooks"]}
