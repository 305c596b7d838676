"""Commands that train or plan, wherever README, docs and configs/README.md show them, have settings
that the program accepts; with a hardware file, they divide over its devices."""

import re
import shlex
from pathlib import Path

import pytest
from mesh_devices import HARDWARE
from test_setup_guides import check_training

from manus_jax.config.commands import read_train_config
from manus_jax.rollout.build_rollout import with_engine_settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "configs" / "README.md", *(ROOT / "docs").rglob("*.md")]
SHOWN = re.compile(r"python -m manus_jax\.(train|plan) ([^\n`#&]*--gin_file=configs[^\n`#&]*)")


def commands():
    for page in PAGES:
        text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
        for match in SHOWN.finditer(text):
            if "$" not in match[2]:  # the body of a shell function or loop
                yield str(page.relative_to(ROOT)), match[2]


def test_commands_are_found_on_many_pages():
    assert len({page for page, _ in commands()}) >= 9


@pytest.mark.parametrize("page, shown", sorted(set(commands())))
def test_a_command_has_settings_that_the_program_accepts(page, shown):
    words = [w for w in shlex.split(shown) if w.startswith(("--gin_file=", "--gin_param="))]
    files = [w.partition("=")[2] for w in words if w.startswith("--gin_file=")]
    params = [w.partition("=")[2] for w in words if w.startswith("--gin_param=")]
    if Path(files[-1]).stem in HARDWARE:
        check_training(words)
    else:
        with_engine_settings(read_train_config([str(ROOT / file) for file in files], params))
