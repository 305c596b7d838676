"""The README's examples run, and the paths that it names exist."""

import re
from pathlib import Path

import pytest

from manus_jax.rewards import REWARDS, RewardSettings, compute

ROOT = Path(__file__).parents[1]


def example(word):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return next(block for block in blocks if word in block)


def test_the_reward_example_can_be_chosen_and_scores():
    with REWARDS.restored():
        exec(example("REWARDS.register"), {})
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


def test_every_path_that_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    paths = set(re.findall(r"`((?:configs|scripts|benchmarks|manus_jax|envs)/[\w./]+)`", text))
    paths |= set(re.findall(r"--gin_file=(configs/[\w./]+)", text))
    missing = sorted(p for p in paths if not (ROOT / p).exists())
    assert len(paths) > 8 and not missing
