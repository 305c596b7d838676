"""Bugs of OpenManus-RL that no other test covers; `test_every_bug_is_covered.py` lists them all."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_trajectories import made, segment

from manus_jax import train
from manus_jax.algorithms.recipes import compute_advantages
from manus_jax.config.settings import (
    AlgorithmSettings,
    DataSettings,
    EnvSettings,
    OptimizerSettings,
    RolloutSettings,
)
from manus_jax.data.tasks import Task
from manus_jax.learner.optimizer import learning_rate, make_optimizer
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, abstract_model
from manus_jax.rollout.batch import RewardAllocation, to_batch
from manus_jax.rollout.trajectory import EpisodeSpec, Segment, Trajectory, Turn
from manus_jax.training.learner_specs import make_recipe
from manus_jax.training.task_sources import read_task_sources
from manus_jax.training.trainer import update_metrics

EOS = 9


def episode(group, reward=1.0):
    """Given 2 tokens, a turn of 2 that ends with EOS, given 1, a turn of 2 that does."""
    turn_ids = np.array([-1, -1, 0, 0, -1, 1, 1], np.int32)
    mask = turn_ids >= 0
    ids = np.array([4, EOS, 5, EOS, 6, 7, EOS], np.int32)
    segment = Segment(ids, mask, np.where(mask, -1, 0).astype(np.float32), turn_ids, turn_ids)
    turns = (
        Turn("a", "up", "seen", 0.0, start=2, stop=4),
        Turn("b", "up", "seen", reward, start=5, stop=7),
    )
    spec = EpisodeSpec(Task("maze", group, f"maze_{group}"), f"{group}/{reward}", str(group))
    return Trajectory(spec, (), "Go.", turns, (segment,), reward, reward > 0, "done")


@pytest.mark.bug("B7")
def test_ppo_has_a_reference_and_its_kl_coefficient_is_the_one_that_was_set():
    assert make_recipe(AlgorithmSettings(recipe="ppo")).needs_reference
    set_to = make_recipe(AlgorithmSettings(recipe="ppo", kl_coef=0.5))
    assert set_to.kl_coef == 0.5 and set_to.kl_placement == "reward"


@pytest.mark.bug("B8")
@pytest.mark.parametrize(("lam", "wanted"), [(0.0, [0.0, 0.5]), (1.0, [0.5, 0.5])])
def test_lam_has_the_same_name_where_it_is_set_and_read(lam, wanted):
    recipe = make_recipe(AlgorithmSettings(recipe="ppo", lam=lam, gamma=1.0))
    adv, _ = compute_advantages(
        dataclasses.replace(recipe, whiten=False),
        jnp.array([[0.0, 1.0]]),
        jnp.ones((1, 2), bool),
        jnp.array([0]),
        jnp.array([True]),
        values=jnp.array([[0.5, 0.5]]),
    )
    assert adv.tolist() == [wanted]


@pytest.mark.slow
@pytest.mark.bug("B9")
def test_val_only_validates_and_trains_nothing(tmp_path):
    params = (
        "env.names = ['maze']",
        f"train.run_dir = '{tmp_path}'",
        "train.val_only = True",
        "train.val_tasks = 2",
        "train.baselines = ['oracle']",
        "rollout.max_turns = 40",
        "rollout.max_tokens_per_turn = 4",
        "rollout.max_total_tokens = 512",
        "rollout.prompt_source = 'observation'",
        "data.max_length = 512",
        "data.rows = 8",
        "engine.slots = 8",
        "warm_start.steps = 1",
        "warm_start.traces = 2",
        "warm_start.batch_size = 2",
        "scratch.vocab_size = 400",
        "scratch.hidden_size = 16",
        "scratch.intermediate_size = 32",
        "scratch.num_layers = 1",
        "scratch.num_heads = 2",
        "scratch.head_dim = 8",
    )
    train.main([f"--gin_param={p}" for p in params])
    [line] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 0 and "val/maze/success_rate" in line
    assert line["val_oracle/maze/success_rate"] == 1.0
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))
    assert not (tmp_path / "export").exists()


@pytest.mark.bug("B14")
def test_parameters_and_moments_are_float32_and_take_the_smallest_step_though_products_are_not():
    sizes = Architecture("qwen3", 64, 16, 32, 1, 2, 1, 8, qkv_bias=False, qk_norm=True)
    _, shapes = abstract_model(Transformer, sizes, Compute(dtype=jnp.bfloat16))
    settings = OptimizerSettings(weight_decay=0.0)
    optimizer = make_optimizer(learning_rate(1e-6, "constant", 0, 1, 0.0), settings)
    moments = jax.eval_shape(optimizer.init, shapes)
    for leaf in jax.tree.leaves((shapes, moments)):
        assert leaf.dtype == jnp.float32 or jnp.issubdtype(leaf.dtype, jnp.integer)
    # bfloat16 has three digits: 0.02 plus one millionth would be 0.02 again.
    weights = {"kernel": jnp.full(8, 0.02, jnp.float32)}
    updates, _ = optimizer.update(weights, optimizer.init(weights), weights)
    np.testing.assert_allclose(weights["kernel"] + updates["kernel"], 0.02 - 1e-6, rtol=1e-6)


@pytest.mark.bug("B21")
def test_the_defaults_warm_up_for_no_part_of_the_run_and_sample_from_the_whole_distribution():
    assert OptimizerSettings().warmup_steps == 0
    defaults = RolloutSettings()
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, 1.0, 0)


@pytest.mark.bug("B22")
def test_every_epoch_takes_every_group_once_in_another_order():
    episodes = [episode(g, r) for g in range(6) for r in (0, 1)]
    batch = to_batch(episodes, RewardAllocation())
    parts = list(batch.make_iterator(2, by="group_id", epochs=3, seed=(0, 1)))
    assert [len(part) for part in parts] == [4] * 9
    taken = [uid for part in parts for uid in part.non_tensor_batch["uid"]]
    epochs = [taken[start : start + 12] for start in (0, 12, 24)]
    assert all(sorted(epoch) == sorted(e.uid for e in episodes) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.bug("B22")
def test_the_metrics_of_a_step_are_those_of_all_its_updates():
    updates = [{"loss": float(n), "packing/rows": 1.0} for n in range(1, 10)]
    metrics = update_metrics(updates, [])
    assert metrics["actor/loss"] == 5.0  # the mean of 1 to 9, not the last
    assert metrics["packing/rows"] == 1.0


@pytest.mark.bug("B30")
def test_a_padding_id_that_is_the_end_of_turn_hides_no_token():
    longer = made([segment([(None, 3), (0, 6)])], [0.5])
    proto = to_batch([episode(0), longer], RewardAllocation(), pad_id=EOS)[:1]
    assert proto.batch["attention_mask"].tolist() == [[True] * 7 + [False] * 2]
    trained = np.asarray(proto.batch["input_ids"])[np.asarray(proto.batch["loss_mask"])]
    assert trained.tolist() == [5, EOS, 7, EOS]
    assert proto.batch["token_level_rewards"].tolist() == [[0, 0, 0, 0, 0, 0, 1, 0, 0]]


@pytest.mark.bug("B32")
def test_validation_rows_that_are_also_training_rows_are_not_trained_on(tmp_path):
    train_file, val_file = tmp_path / "train.json", tmp_path / "val.json"
    train_file.write_text(json.dumps([f"maze_{n}" for n in range(10)]))
    val_file.write_text(json.dumps(["maze_3", "lmrlgym_maze_7"]))
    data = DataSettings(train_files=(str(train_file),), val_files=(str(val_file),))
    [(_, tasks, _)], eval_set = read_task_sources(data, EnvSettings(names=("maze",)), 20)
    assert [task.item for task in eval_set.tasks] == [3, 7]
    assert [task.item for task in tasks] == [0, 1, 2, 4, 5, 6, 8, 9]
