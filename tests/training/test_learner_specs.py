"""Learners from settings: schedules count steps, and buffers have room for the batch."""

import dataclasses

import jax
import numpy as np
import pytest
from mesh_devices import gpus

from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import read_train_config
from manus_jax.learner.mesh import make_mesh
from manus_jax.models.architecture import Architecture
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.compiling import abstract_arguments
from manus_jax.rollout.build_rollout import with_engine_settings
from manus_jax.training.learner_specs import (
    check_experts,
    check_lengths,
    check_memory,
    make_recipe,
    policy_lr,
    policy_spec,
    replays_experts,
    updates_per_step,
)

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


def test_with_router_replay_every_pass_reads_the_experts_of_the_servers():
    servers = ("vllm.urls = ['http://a:1']", "vllm.push = False", "vllm.router_replay = True")
    config = with_engine_settings(config_of("engine.name = 'vllm'", "data.rows = 4", *servers))
    assert replays_experts(config) and not replays_experts(config_of())
    arch = dataclasses.replace(ARCH, family="qwen3_moe", num_experts=4, experts_per_token=2)
    check_experts(config.model, arch, replay=True)
    with pytest.raises(ConfigError, match="router_replay is not read: qwen3 has no experts"):
        check_experts(config.model, ARCH, replay=True)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    spec = policy_spec(config, make_recipe(config.algorithm), arch, mesh)
    assert spec.routing == (1, 2)
    _, planned, _ = abstract_arguments(spec, mesh, 3)
    assert planned["routed_experts"].shape == (3, 4, config.data.max_length, 1, 2)


def test_episodes_longer_than_a_row_are_refused_with_the_nearest_row():
    lengths = ("rollout.max_total_tokens = 9000", "data.max_length = 8192")
    with pytest.raises(ConfigError, match=r"9000 is more than .* 8192, .* data.max_length = 9088,"):
        check_lengths(config_of(*lengths))
    check_lengths(config_of("rollout.max_total_tokens = 8192", "data.max_length = 8192"))


def test_a_model_that_no_batch_makes_fit_is_refused_with_the_devices_that_it_needs():
    """7,615,616,512 parameters x 8 bytes = 56.7 GiB: 28.4 GiB on each of two devices."""
    devices = gpus(machines=1, per_machine=4, per_process=4)
    for device in devices:
        device.memory_stats = lambda: {"bytes_limit": int(15.75 * 2**30)}
    arch, data = find_architecture("qwen2.5-7b"), config_of("data.rows = 4").data
    message = r"56.7 GiB in float32, 28.4 GiB on each of the 2 devices .* 15.8 GiB: use at least 4"
    with pytest.raises(ConfigError, match=message):
        check_memory(arch, data, make_mesh(data=2, fsdp=2, devices=devices))
    check_memory(arch, data, make_mesh(fsdp=4, devices=devices))
