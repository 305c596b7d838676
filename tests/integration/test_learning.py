"""Training makes an agent better, and only because of its reward.

The agent begins by pulling levers almost at random (one in nine episodes is won so). GRPO and PPO
find the right ones out; with a reward that has nothing to do with what the agent did they do not.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = SUPPORT.parents[1]
SETTINGS = (
    "env.names = ['lever_env']",
    "train.batch_size = 9",
    "train.group_size = 8",
    "train.total_steps = 30",
    "train.test_freq = 30",
    "train.save_freq = 30",
    "train.val_tasks = 36",
    "train.val_temperature = 1.0",
    "train.export = False",
    "rollout.max_turns = 2",
    "rollout.max_tokens_per_turn = 6",
    "rollout.max_total_tokens = 96",
    "rollout.prompt_source = 'observation'",
    "rollout.action_format = 'raw'",
    "engine.slots = 80",
    "data.max_length = 128",
    "data.rows = 4",
    "warm_start.steps = 80",
    "warm_start.traces = 90",
    "warm_start.random_share = 0.9",
    "warm_start.batch_size = 30",
    "warm_start.lr = 0.01",
    "scratch.vocab_size = 320",
    "scratch.hidden_size = 32",
    "scratch.intermediate_size = 64",
    "scratch.num_layers = 2",
    "scratch.num_heads = 2",
    "scratch.num_kv_heads = 2",
    "scratch.head_dim = 16",
    "optimizer.lr = 0.003",
    "algorithm.old_log_probs = 'bypass'",
    "algorithm.kl_placement = 'none'",
    "algorithm.kl_coef = 0.0",
)
RECIPES = {
    "grpo": ("algorithm.recipe = 'grpo'",),
    "ppo": ("algorithm.recipe = 'ppo'", "algorithm.critic_lr = 0.003"),
}


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(SUPPORT),
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}


def won_before_and_after(run_dir, *more):
    """In a process with one device, as a user on a laptop has it."""
    config = run_dir.with_name("levers.gin")
    bindings = (*SETTINGS, f"train.run_dir = '{run_dir}'", *more)
    config.write_text("import lever_env\n" + "\n".join(bindings) + "\n")
    subprocess.run(
        [sys.executable, "-m", "manus_jax.train", f"--gin_file={config}"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return lines[0]["val/success_rate"], lines[-1]["val/success_rate"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_the_reward_rises(tmp_path, recipe, seed):
    before, after = won_before_and_after(tmp_path / "run", *RECIPES[recipe], f"train.seed = {seed}")
    assert before < 0.5
    assert after > before + 0.3


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_reward_that_is_drawn_by_lot_teaches_nothing(tmp_path, recipe):
    more = (*RECIPES[recipe], "algorithm.reward = 'by_lot'")
    before, after = won_before_and_after(tmp_path / "run", *more)
    assert after < before + 0.2
