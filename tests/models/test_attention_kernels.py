"""The accelerators' kernels, in interpret mode, against plain attention, on unequal segments."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manus_jax.learner import objectives
from manus_jax.learner.mesh import make_mesh
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import AttentionKernel, attention, pick_implementation
from manus_jax.models.transformer import Compute, Transformer, abstract_model

pytestmark = pytest.mark.slow


def inputs(rows=1, length=256, heads=2, kv_heads=1, dim=64, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.normal(size=(rows, length, h, dim)), jnp.float32)
        for h in (heads, kv_heads, kv_heads)
    )
    cuts = np.array([100, 230])
    segments = np.searchsorted(cuts, np.arange(length), side="right") + 1
    segments[250:] = 0
    return q, k, v, jnp.asarray(np.broadcast_to(segments, (rows, length)), jnp.int32)


def naive(q, k, v, segments):
    """One softmax over all keys, no blocks."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    length = q.shape[1]
    mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((length, length)) > 0)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def with_kernel(kernel):
    return functools.partial(attention, kernel=kernel)


def output_and_gradient(attend, args):
    q, k, v, segments = args
    real = (segments > 0)[..., None, None]

    def loss(q, k, v):
        out = jnp.where(real, attend(q, k, v, segments), 0.0)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, grads


def lowered_step(platform, kernel, remat, length=256):
    """The gradient of a small model's loss, as text for `platform`."""
    arch = Architecture("qwen2", 256, 256, 256, 2, 2, 1, 128, qkv_bias=True)
    rows = jax.ShapeDtypeStruct((1, length), jnp.int32)
    batch = {n: rows for n in ("input_ids", "segment_ids", "positions")}
    batch["loss_mask"] = jax.ShapeDtypeStruct((1, length), jnp.bool_)
    batch["loss_weights"] = jax.ShapeDtypeStruct((1, length), jnp.float32)
    graphdef, params = abstract_model(Transformer, arch, Compute("bfloat16", remat, kernel))
    step = jax.jit(jax.grad(objectives.supervised(graphdef), has_aux=True))
    return step.trace(params, batch).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("length", [256, 200])
def test_blocks_of_queries_equal_one_softmax_forward_and_backward(length):
    args = tuple(x[:, :length] for x in inputs(rows=2, heads=4, kv_heads=2))
    expected = output_and_gradient(naive, args)
    plain = output_and_gradient(with_kernel(AttentionKernel()), args)
    chex.assert_trees_all_close(plain, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("remat", "kernels"), [("full", 4), ("attention", 3), ("minimal", 3), ("none", 3)]
)
def test_the_forward_kernel_runs_again_only_where_its_output_was_not_kept(remat, kernels):
    # Forward, backward for queries, backward for keys and values.
    text = lowered_step("tpu", AttentionKernel("splash"), remat)
    assert text.count("stablehlo.custom_call @tpu_custom_call") == kernels


@pytest.mark.parametrize(("remat", "products"), [("full", 9), ("minimal", 7), ("none", 7)])
def test_plain_attention_has_as_many_products_as_flash_attention(remat, products):
    # Scores and output forward; scores again and four gradients backward; one block of queries.
    text = lowered_step("cpu", AttentionKernel("plain"), remat, length=128)
    in_attention = re.findall(r"dot_general.*batching_dims = \[0, 1\] x \[0, 1\]", text)
    assert len(in_attention) == products


@pytest.mark.parametrize("name", ["splash", "triton"])
def test_kernels_equal_plain_attention_forward_and_backward(name):
    args = inputs()
    expected = output_and_gradient(with_kernel(AttentionKernel()), args)
    kernel = AttentionKernel(name, interpret=True)
    chex.assert_trees_all_close(
        output_and_gradient(with_kernel(kernel), args), expected, atol=2e-4, rtol=2e-4
    )


# data, fsdp, tensor, sequence: rows and heads; tokens; more devices than key-value heads.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("splash", (1, 2, 2, 1)),
        ("splash", (1, 1, 1, 2)),
        ("splash", (1, 2, 4, 1)),
        ("triton", (1, 1, 2, 2)),
        ("plain", (1, 1, 4, 2)),
    ],
)
def test_sharded_kernels_equal_plain_attention_forward_and_backward(name, sizes):
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    args = inputs(rows=2, heads=4, kv_heads=2)
    expected = output_and_gradient(with_kernel(AttentionKernel()), args)
    out = output_and_gradient(
        with_kernel(AttentionKernel(name, mesh, interpret=name != "plain")), args
    )
    chex.assert_trees_all_close(out, expected, atol=2e-4, rtol=2e-4)


def test_the_splash_kernel_splits_rows_into_more_parts_than_two():
    mesh = make_mesh(sequence=4, devices=jax.devices()[:4])
    args = inputs(length=512)
    expected = output_and_gradient(with_kernel(AttentionKernel()), args)
    out = output_and_gradient(with_kernel(AttentionKernel("splash", mesh, interpret=True)), args)
    chex.assert_trees_all_close(out, expected, atol=2e-4, rtol=2e-4)


def test_the_platform_decides_in_one_place():
    assert [pick_implementation(p) for p in ("cpu", "tpu", "cuda", "gpu")] == [
        "plain",
        "splash",
        "triton",
        "triton",
    ]


@pytest.mark.parametrize("sequence", [1, 2])
@pytest.mark.parametrize(
    ("platform", "marker"), [("tpu", "tpu_custom_call"), ("cuda", "xla.gpu.triton")]
)
def test_the_whole_step_lowers_with_the_platforms_kernel(platform, marker, sequence):
    mesh = make_mesh(sequence=sequence, devices=jax.devices()[:sequence])
    kernel = AttentionKernel(pick_implementation(platform), mesh)
    assert marker in lowered_step(platform, kernel, "full")
