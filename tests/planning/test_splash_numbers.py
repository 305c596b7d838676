"""Splash attention in interpret mode gives the numbers of the CPU implementation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sequences import batch_of, packed_arrays, weighted

from manus_jax.learner import objectives
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import AttentionKernel, attention
from manus_jax.models.transformer import Compute, Transformer, abstract_model, init_params

pytestmark = pytest.mark.slow

SPLASH = AttentionKernel("splash", interpret=True)


def one_softmax(q, k, v, segments):
    """Every query against every key, masked; no blocks."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = np.tril(np.ones((q.shape[1],) * 2, bool))
    mask = (segments[:, :, None] == segments[:, None, :]) & causal
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def test_segments_across_many_blocks_of_splash_and_shared_keys():
    # Five blocks of 128; segments end inside blocks, on a border, and padding fills two blocks.
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 640, h, 32)), jnp.float32) for h in (4, 2, 2))
    ends = ([70, 300, 384, 600], [128, 129, 380])
    segments = np.stack([np.searchsorted(e, np.arange(640), side="right") + 1 for e in ends])
    segments[0, 600:] = 0
    segments[1, 380:] = 0
    segments = jnp.asarray(segments, jnp.int32)
    real = (segments > 0)[..., None, None]

    def loss(run):
        def total(q, k, v):
            out = jnp.where(real, run(q, k, v), 0.0)
            return jnp.sum(jnp.cos(out)), out

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    expected = loss(lambda q, k, v: one_softmax(q, k, v, segments))
    found = loss(lambda q, k, v: attention(q, k, v, segments, SPLASH))
    chex.assert_trees_all_close(found, expected, atol=5e-4, rtol=5e-4)


def test_loss_and_gradients_of_packed_rows_are_those_of_plain_attention():
    arch = Architecture("qwen2", 96, 64, 96, 2, 4, 2, 16, qkv_bias=True)
    rng = np.random.default_rng(1)
    samples = [
        {"input_ids": rng.integers(0, 96, n).astype(np.int32), "loss_mask": np.arange(n) % 7 > 3}
        for n in (200, 90, 40, 180, 130, 17)
    ]
    arrays, _ = packed_arrays(weighted(batch_of(samples)), 4, 256)
    batch = {name: jnp.asarray(x[0]) for name, x in arrays.items()}
    params = init_params(Transformer, arch, Compute(), 0)

    def gradients(kernel):
        graphdef, _ = abstract_model(Transformer, arch, Compute("float32", "full", kernel))
        objective = objectives.supervised(graphdef)
        return jax.jit(jax.value_and_grad(objective, has_aux=True))(params, batch)

    chex.assert_trees_all_close(
        gradients(SPLASH), gradients(AttentionKernel("plain")), atol=2e-4, rtol=2e-3
    )
