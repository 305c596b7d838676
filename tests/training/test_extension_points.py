"""What others register is found by name, given what it needs, and refused early where it is not."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from manus_jax.algorithms import recipes
from manus_jax.algorithms.recipes import Recipe, policy_loss, register_policy_loss, register_recipe
from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import AlgorithmSettings, EngineSettings, VllmSettings
from manus_jax.data.tasks import Task
from manus_jax.rollout import batch as samples
from manus_jax.rollout.batch import (
    RewardAllocation,
    register_field,
    to_data_proto,
    to_samples,
)
from manus_jax.rollout.trajectory import EpisodeSpec, Segment, Trajectory, Turn
from manus_jax.training import build_rollout as playing
from manus_jax.training.learner_specs import make_recipe, read_config


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
def late(monkeypatch):
    """A field that says how late in the episode a token's turn is, and a loss that reads it."""
    monkeypatch.setattr(samples, "_MORE_FIELDS", {})
    for known in (recipes.POLICY_LOSSES, recipes.RECIPES):
        monkeypatch.setitem(known, "late", None)

    @register_field("lateness")
    def lateness(trajectory, segment):
        turns = trajectory.segments[segment].turn_ids
        return (turns + 1) / len(trajectory.turns)

    @register_policy_loss("late", "lateness")
    def loss(recipe, tokens):
        return -tokens.fields["lateness"] * tokens.advantages * tokens.log_probs, {}

    del recipes.RECIPES["late"]
    register_recipe(Recipe("late", "grpo", loss="late", corrections=()))


def test_a_field_is_in_every_sample_and_in_the_data_proto(late):
    [sample], _ = to_samples([episode()], RewardAllocation())
    assert sample.fields["lateness"].tolist() == [0, 0, 0.5, 0.5, 0, 1]
    proto = to_data_proto([episode()], RewardAllocation(), length=8)
    assert proto.batch["lateness"].tolist() == [[0, 0, 0.5, 0.5, 0, 1, 0, 0]]


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
    with pytest.raises(ValueError, match="wants lateness in fields"):
        policy_loss(recipe)(jnp.zeros((1, 3)), {k: v for k, v in fields.items() if k != "lateness"})


def test_a_loss_whose_field_nobody_makes_is_refused_before_anything_is_played(late):
    del samples._MORE_FIELDS["lateness"]
    with pytest.raises(ConfigError, match="'late' needs the field 'lateness'; samples have"):
        make_recipe(AlgorithmSettings(recipe="late"))


def test_a_field_of_another_length_names_itself_and_the_episode(late):
    @register_field("short")
    def short(trajectory, segment):
        return np.zeros(3)

    with pytest.raises(ValueError, match=r"'short' of episode maze_3#0 has shape \(3,\), and its"):
        to_samples([episode()], RewardAllocation())
    with pytest.raises(ValueError, match="have a field 'turn_ids' already"):
        register_field("turn_ids")(short)


def test_an_engine_is_made_by_name_and_closed_at_the_end(monkeypatch):
    monkeypatch.setattr(playing, "ENGINES", dict(playing.ENGINES))
    closed = []

    class Silent:
        version, max_length = 0, 64
        accepts_streamed_tensors = True

        def close(self):
            closed.append(True)

    made = []

    @playing.register_engine("silent", Silent)
    def make(source, params, settings, own_settings, max_length):
        made.append((source, params, own_settings, max_length))
        return Silent()

    assert playing.engine_kind("silent").engine.accepts_streamed_tensors
    settings = EngineSettings(name="silent")
    with playing.open_engine("source", "params", settings, {"volume": 0}, 64) as engine:
        assert isinstance(engine, Silent) and not closed
    assert closed and made == [("source", "params", {"volume": 0}, 64)]
    with pytest.raises(ValueError, match="there is an engine 'silent' already"):
        playing.register_engine("silent", Silent)(make)


def test_an_engine_that_is_not_there_lists_those_that_are():
    with pytest.raises(ConfigError, match=r"engine\.name = 'loud'; there are jax"):
        playing.engine_kind("loud")


def test_settings_of_an_engine_that_is_not_chosen_are_refused():
    run = ["train.run_dir = 'x'", "env.names = ['maze']", "vllm.servers = 1"]
    with pytest.raises(
        ConfigError, match=r"vllm\.servers is set, and nothing in this command reads"
    ):
        read_config([], run)
    chosen, _ = read_config([], [*run, "engine.name = 'vllm'"])
    assert chosen.engine_settings == VllmSettings(servers=1)


def test_recipes_without_fields_of_their_own_want_none():
    for name in recipes.RECIPES:
        assert recipes.get_recipe(name).extra_fields == ()
        assert dataclasses.replace(recipes.get_recipe(name), entropy_coef=0.1).extra_fields == ()
