"""From settings to learners: schedules count steps, and buffers have room for the batch."""

import jax
import numpy as np
import pytest

from manus_jax.config.commands import read_train_config
from manus_jax.learner.mesh import make_mesh
from manus_jax.models.architecture import Architecture
from manus_jax.training.learner_specs import make_recipe, policy_lr, policy_spec, updates_per_step

ARCH = Architecture("qwen3", 64, 16, 32, 1, 2, 1, 8, qk_norm=True)


def config_of(*params):
    usual = ("train.run_dir = 'x'", "env.names = ['maze']", "optimizer.lr = 1.0")
    return read_train_config([], [*usual, *params])


def test_a_schedule_reaches_its_end_with_the_last_step_whatever_the_updates_per_step():
    cosine = ("optimizer.schedule = 'cosine'", "train.total_steps = 300", "train.batch_size = 32")
    one = policy_lr(config_of(*cosine))
    config = config_of(*cosine, "algorithm.mini_batch_size = 8", "algorithm.ppo_epochs = 2")
    assert updates_per_step(config) == 8
    eight = policy_lr(config)
    for step in (0, 38, 150, 299):
        assert float(eight(8 * step)) == pytest.approx(float(one(step)))
        assert float(eight(8 * step + 7)) == pytest.approx(float(one(step)))
    assert float(eight(8 * 38)) > 0.95  # it was 0 here when updates counted as steps
    assert float(eight(8 * 300)) == pytest.approx(0.0, abs=1e-6)


def test_steps_in_which_only_the_critic_learns_are_not_part_of_the_schedule():
    linear = ("optimizer.schedule = 'linear'", "train.total_steps = 10")
    lr = policy_lr(config_of(*linear, "algorithm.critic_warmup = 4"))
    np.testing.assert_allclose([float(lr(n)) for n in (0, 3, 6)], [1.0, 0.5, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("params", "update", "step"),
    [
        ((), 8, 8),
        (("algorithm.mini_batch_size = 4",), 4, 8),
        (("rollout.memory_turns = 2", "rollout.max_turns = 30"), 8, 8),
    ],
)
def test_buffers_have_room_for_the_episodes_of_a_mini_batch(params, update, step):
    sizes = ("train.batch_size = 8", "train.group_size = 4", "data.rows = 4")
    config = config_of(*sizes, *params)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    spec = policy_spec(config, make_recipe(config.algorithm), ARCH, mesh)
    assert (spec.update_micro_batches, spec.forward_micro_batches) == (update, step)
