"""The README's examples run, and the configs that it and others name can be read."""

import re
from pathlib import Path

import pytest

from manus_jax.agentgym.table import environment
from manus_jax.config import binding as config
from manus_jax.config import settings
from manus_jax.rewards import RewardSettings, compute
from manus_jax.rewards.registry import _FUNCTIONS
from manus_jax.rollout import action_formats as actions

ROOT = Path(__file__).parents[1]
GROUPS = {value.gin_name: value for value in vars(settings).values() if hasattr(value, "gin_name")}


def example(word):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return next(block for block in blocks if word in block)


def test_the_reward_example_can_be_chosen_and_scores():
    try:
        exec(example("register_reward"), {})
        score = compute(
            RewardSettings("short"),
            "episode",
            "text",
            None,
            (),
            env_reward=1.0,
            success=True,
            env="maze",
            item_id="maze_1",
            finish_reason="done",
            extra={},
        )
        assert score.total == pytest.approx(1.1)
        assert score.components == {"env": 1.0, "saved": pytest.approx(0.1)}
    finally:
        _FUNCTIONS.pop("short", None)


def test_the_action_format_example_asks_and_parses():
    try:
        exec(example("register_format"), {})
        bold = actions.format_for(environment("maze"), "bold")
        said = bold.render("The way up is free.", "move up")
        assert bold.parse(said, "line").action == "move up"
        assert not bold.parse("**move up** or **move down**", "line").valid
    finally:
        actions.FORMATS.pop("bold", None)


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.gin")), ids=lambda p: p.name)
def test_every_config_has_a_header_and_holds_only_known_settings(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    assert re.search(r"^#\s+python -m manus_jax\.\w+ --gin_file=configs/" + path.name, text, re.M)
    config.parse([str(path)], [])
    bound = {m for m in re.findall(r"^(\w+)\.\w+ =", text, flags=re.MULTILINE)}
    config.build(*(GROUPS[name] for name in bound))


def test_every_path_that_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    paths = set(re.findall(r"`((?:configs|scripts|benchmarks|manus_jax|envs)/[\w./]+)`", text))
    paths |= set(re.findall(r"--gin_file=(configs/[\w.]+)", text))
    missing = sorted(p for p in paths if not (ROOT / p).exists())
    assert len(paths) > 8 and not missing
