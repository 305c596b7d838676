"""Registered components are found by name and get their inputs; unknown ones are refused early."""

import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from manus_jax.algorithms.recipes import POLICY_LOSSES, RECIPES, Recipe, needs, policy_loss
from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import read_train_config
from manus_jax.config.settings import AlgorithmSettings, EngineSettings, VllmSettings
from manus_jax.data.tasks import Task
from manus_jax.errors import UserError
from manus_jax.learner.packing import PackedRows, RowShape, add_packing
from manus_jax.rollout import build_rollout as playing
from manus_jax.rollout.batch import TOKEN_COLUMNS, RewardAllocation, to_batch
from manus_jax.rollout.trajectory import EpisodeSpec, Segment, Trajectory, Turn
from manus_jax.training.learner_specs import make_recipe


def episode():
    """Given 2 tokens, a turn of 2, given 1, a turn of 1."""
    turn_ids = np.array([-1, -1, 0, 0, -1, 1], np.int32)
    mask = turn_ids >= 0
    zeros = np.zeros(6, np.float32)
    segment = Segment(np.arange(6, dtype=np.int32), mask, zeros, turn_ids, turn_ids)
    turns = (
        Turn("a", "up", "seen", 0.0, start=2, stop=4),
        Turn("b", "up", "seen", 1.0, start=5, stop=6),
    )
    spec = EpisodeSpec(Task("maze", 3, "maze_3"), "maze_3#0", "maze_3")
    return Trajectory(spec, (), "Go.", turns, (segment,), 1.0, True, "done")


@pytest.fixture
def late():
    """A field that says how late in the episode a token's turn is, and a loss that reads it."""
    with TOKEN_COLUMNS.restored(), late_loss():
        register_lateness()
        yield


def register_lateness():
    @TOKEN_COLUMNS.register("lateness")
    def lateness(trajectory, segment):
        turns = trajectory.segments[segment].turn_ids
        return (turns + 1) / len(trajectory.turns)


@contextlib.contextmanager
def late_loss():
    with POLICY_LOSSES.restored(), RECIPES.restored():

        @POLICY_LOSSES.register("late")
        @needs("lateness")
        def loss(recipe, tokens):
            return -tokens.fields["lateness"] * tokens.advantages * tokens.log_probs, {}

        RECIPES.add(Recipe("late", "grpo", loss="late", corrections=()))
        yield


def test_a_column_is_in_every_batch_and_in_the_packed_rows_of_the_learner(late):
    batch = to_batch([episode()], RewardAllocation())
    assert batch.batch["lateness"].tolist() == [[0, 0, 0.5, 0.5, 0, 1]]
    packed = PackedRows(add_packing(batch, 8), RowShape(1, 8), 1).arrays(["lateness"])
    assert packed["lateness"].tolist() == [[[0, 0, 0.5, 0.5, 0, 1, 0, 0]]]


def test_a_loss_is_given_the_fields_that_it_needs_and_nothing_outside_the_mask(late):
    recipe = make_recipe(AlgorithmSettings(recipe="late"))
    assert recipe.extra_fields == ("lateness",) and "lateness" in recipe.loss_fields
    fields = {
        "old_log_probs": jnp.zeros((1, 3)),
        "advantages": jnp.array([[1.0, 2.0, 4.0]]),
        "mask": jnp.array([[True, True, False]]),
        "lateness": jnp.array([[0.5, 1.0, 99.0]]),
    }
    loss_t, _ = policy_loss(recipe)(jnp.array([[-3.0, -1.0, -7.0]]), fields)
    assert loss_t.tolist() == [[1.5, 2.0, 0.0]]
    with pytest.raises(ValueError, match="needs lateness in fields"):
        policy_loss(recipe)(jnp.zeros((1, 3)), {k: v for k, v in fields.items() if k != "lateness"})


def test_a_loss_that_needs_an_unknown_field_is_refused_before_anything_is_played():
    with (
        late_loss(),
        pytest.raises(ConfigError, match="'late' needs the column 'lateness'; batches have"),
    ):
        make_recipe(AlgorithmSettings(recipe="late"))


def test_a_field_of_another_length_names_itself_and_the_episode(late):
    @TOKEN_COLUMNS.register("short")
    def short(trajectory, segment):
        return np.zeros(3)

    with pytest.raises(ValueError, match=r"'short' of episode maze_3#0 has shape \(3,\), but its"):
        to_batch([episode()], RewardAllocation())
    with pytest.raises(ValueError, match="token column 'turn_ids' is already registered"):
        TOKEN_COLUMNS.register("turn_ids")(short)


@pytest.fixture
def engines():
    with playing.ENGINES.restored():
        yield playing.ENGINES


def test_an_engine_is_made_by_name_and_closed_at_the_end(engines):
    closed = []

    class Silent:
        version, max_length = 0, 64
        on_learner_device = False

        def close(self):
            closed.append(True)

    made = []

    @engines.register("silent")
    @playing.engine_kind(Silent)
    def make(source, params, settings, own_settings, max_length):
        made.append((source, params, own_settings, max_length))
        return Silent()

    assert not engines["silent"].engine.on_learner_device
    settings = EngineSettings(name="silent")
    with playing.open_engine("source", "params", settings, {"volume": 0}, 64) as engine:
        assert isinstance(engine, Silent) and not closed
    assert closed and made == [("source", "params", {"volume": 0}, 64)]
    with pytest.raises(ValueError, match="the engine 'silent' is already registered"):
        engines.register("silent")(make)


def test_an_engine_that_is_not_there_lists_those_that_are():
    config = read_train_config(
        [], ["train.run_dir = 'x'", "env.names = ['maze']", "engine.name = 'loud'"]
    )
    with pytest.raises(UserError, match=r"unknown engine 'loud' \(known: jax"):
        playing.with_engine_settings(config)


def test_settings_of_an_engine_that_is_not_chosen_are_refused():
    run = ["train.run_dir = 'x'", "env.names = ['maze']", "vllm.servers = 1"]
    config = read_train_config([], run)
    with pytest.raises(ConfigError, match=r"vllm\.servers is set, but the engine 'jax' does not"):
        playing.with_engine_settings(config)
    chosen = playing.with_engine_settings(read_train_config([], [*run, "engine.name = 'vllm'"]))
    assert chosen.engine_settings == VllmSettings(servers=1)


def test_recipes_without_fields_of_their_own_want_none():
    for name in RECIPES:
        assert RECIPES[name].extra_fields == ()
        assert dataclasses.replace(RECIPES[name], entropy_coef=0.1).extra_fields == ()
