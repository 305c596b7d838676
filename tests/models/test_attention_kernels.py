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
from manus_jax.models.block_attention import _block_inputs
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


def naive(q, k, v, segments, window=10**9):
    """One softmax over all keys, no blocks."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    length = q.shape[1]
    mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((length, length)) > 0)
    mask &= jnp.arange(length)[:, None] - jnp.arange(length)[None, :] < window
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


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("plain", None), ("splash", None), ("plain", (1, 1, 2, 2)), ("splash", (1, 1, 1, 2))],
)
@pytest.mark.parametrize("window", [1, 50, 128])
def test_windows_limit_the_keys_of_each_token_forward_and_backward(name, sizes, window):
    args = inputs(rows=2, heads=4, kv_heads=2)
    mesh = sizes and make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    kernel = AttentionKernel(name, mesh, interpret=name != "plain")
    out = output_and_gradient(functools.partial(attention, kernel=kernel, window=window), args)
    expected = output_and_gradient(functools.partial(naive, window=window), args)
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


def long_rows(seed=0, rows=2, length=768, heads=4, kv_heads=2, dim=16, dtype=jnp.float32):
    """Segments of 1 to 300 tokens; one row is full, the other ends in blocks of padding."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.normal(size=(rows, length, h, dim)), dtype)
        for h in (heads, kv_heads, kv_heads)
    )
    segments = np.stack(
        [np.repeat(np.arange(1, 50), rng.integers(1, 300, 49))[:length] for _ in range(rows)]
    )
    segments[-1, length - 300 :] = 0
    return q, k, v, jnp.asarray(segments, jnp.int32)


@pytest.mark.parametrize("length", [768, 700])
def test_long_rows_that_skip_blocks_equal_one_softmax_forward_and_backward(length):
    args = long_rows(length=length)
    expected = output_and_gradient(naive, args)
    plain = output_and_gradient(with_kernel(AttentionKernel()), args)
    chex.assert_trees_all_close(plain, expected, atol=1e-5, rtol=1e-5)


def test_long_rows_in_bfloat16_are_as_close_to_float32_as_one_softmax():
    exact = output_and_gradient(naive, long_rows())
    errors = []
    for attend in (naive, with_kernel(AttentionKernel())):
        found = output_and_gradient(attend, long_rows(dtype=jnp.bfloat16))
        differences = jax.tree.map(
            lambda a, b: jnp.abs(a.astype(jnp.float32) - b).mean(), found, exact
        )
        errors.append(np.array(jax.tree.leaves(differences)))
    assert (errors[1] <= 1.2 * errors[0]).all()


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (1, 2, 4, 1), (1, 1, 2, 2)])
def test_sharded_long_rows_equal_one_softmax_forward_and_backward(sizes):
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    args = long_rows()
    expected = output_and_gradient(naive, args)
    plain = output_and_gradient(with_kernel(AttentionKernel("plain", mesh)), args)
    chex.assert_trees_all_close(plain, expected, atol=1e-5, rtol=1e-5)


def test_key_blocks_of_long_rows_end_at_the_diagonal_and_start_with_the_first_segment():
    segments = np.repeat([[1, 2, 3, 0]], [150, 400, 90, 128], axis=1)  # 768 tokens
    first = jnp.zeros((), jnp.int32)
    row, last, count, ids = _block_inputs(jnp.asarray(segments), jnp.asarray(segments), first, 128)
    # Block 1 (128 to 255) starts in segment 1, blocks 2 to 4 in segment 2, which starts in block 1,
    # and block 5 is padding.
    assert row.tolist() == [0] * 6
    assert last.tolist() == [0, 1, 2, 3, 4, 5]
    assert count.tolist() == [1, 2, 2, 3, 4, 1]
    assert ids.shape == (6, 128)
