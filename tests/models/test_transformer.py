"""The critic, and causality of both models."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import (
    Compute,
    Critic,
    Transformer,
    abstract_model,
    critic_from_policy,
    init_params,
)

ARCH = Architecture("llama", 50, 32, 48, 2, 4, 2, 8, initializer_range=0.3)


def rows(ids):
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return ids, jnp.ones_like(ids), positions


@pytest.mark.slow
def test_a_critic_starts_from_the_policys_backbone_and_values_nothing_yet():
    policy = init_params(Transformer, ARCH, Compute(), 0)
    critic = critic_from_policy(policy)
    graphdef, shapes = abstract_model(Critic, ARCH, Compute())
    chex.assert_trees_all_equal_shapes(critic, shapes)
    chex.assert_trees_all_equal(critic["backbone"], policy["backbone"])
    ids = np.arange(12, dtype=np.int32)[None]
    values = nnx.merge(graphdef, critic)(*rows(ids))
    np.testing.assert_array_equal(values, np.zeros((1, 12)))
    # It is a copy: the policy's update, which donates its arrays, leaves it alone.
    jax.tree.map(lambda x: x.delete(), policy)
    assert np.isfinite(np.asarray(critic["backbone"]["norm"])).all()


@pytest.mark.slow
@pytest.mark.bug("B18")
def test_a_value_is_of_the_state_before_its_token():
    graphdef, _ = abstract_model(Critic, ARCH, Compute())
    policy = init_params(Transformer, ARCH, Compute(), 0)
    head = jnp.asarray(np.random.default_rng(0).normal(size=32), jnp.float32)
    critic = critic_from_policy(policy) | {"value_head": head}
    value = jax.jit(lambda ids: nnx.merge(graphdef, critic)(*rows(ids)))
    ids = np.arange(12, dtype=np.int32)[None]
    changed = ids.copy()
    changed[0, 5] = 40
    before, after = np.asarray(value(ids))[0], np.asarray(value(changed))[0]
    np.testing.assert_array_equal(before[:6], after[:6])
    assert (np.abs(before[6:] - after[6:]) > 1e-6).all()


@pytest.mark.slow
def test_logits_depend_on_no_later_token():
    graphdef, _ = abstract_model(Transformer, ARCH, Compute())
    params = init_params(Transformer, ARCH, Compute(), 0)
    logits = jax.jit(lambda ids: nnx.merge(graphdef, params)(*rows(ids)))
    ids = np.arange(12, dtype=np.int32)[None]
    changed = ids.copy()
    changed[0, 7] = 40
    np.testing.assert_array_equal(logits(ids)[0, :7], logits(changed)[0, :7])
