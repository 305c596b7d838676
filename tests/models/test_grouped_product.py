"""Products of groups of rows: the form for GPUs against `jax.lax.ragged_dot`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manus_jax.models.grouped_product import blocked_product, grouped_product


@functools.cache
def with_gradients(block):
    """Compiled `(product, gradients of the weighted sum)`; without a block, of `ragged_dot`."""
    product = lambda *args: blocked_product(*args, block) if block else jax.lax.ragged_dot(*args)

    def loss(rows, matrices, sizes, weights):
        used = (jnp.arange(len(rows)) < sizes.sum())[:, None]
        return jnp.sum(jnp.where(used, product(rows, matrices, sizes) * weights, 0))

    return jax.jit(product), jax.jit(jax.grad(loss, (0, 1)))


@pytest.mark.parametrize(
    "sizes", [[3, 0, 9, 4], [0, 0, 0, 16], [4, 4, 4, 4], [0, 5, 0, 0], [0, 0, 0, 0]]
)
def test_blocks_multiply_each_row_with_the_matrix_of_its_group(sizes):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((16, 5), np.float32)
    matrices = rng.standard_normal((4, 5, 3), np.float32)
    weights = rng.standard_normal((16, 3), np.float32)
    used, counts = sum(sizes), jnp.array(sizes)
    groups = np.repeat(np.arange(4), sizes)
    expected = np.einsum("nd,ndf->nf", rows[:used], matrices[groups])
    expected_gradients = with_gradients(None)[1](rows, matrices, counts, weights)
    for block in (1, 4, 128):
        product, gradients = with_gradients(block)
        out = product(rows, matrices, counts)
        np.testing.assert_allclose(out[:used], expected, rtol=1e-5, atol=1e-6)
        assert not out[used:].any()
        found = gradients(rows, matrices, counts, weights)
        for ours, reference in zip(found, expected_gradients, strict=True):
            np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)


def test_gpus_get_blocks_and_tpus_the_ragged_product():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 8), (4, 8, 4))]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    lowered = {
        platform: jax.jit(grouped_product)
        .trace(*shapes, sizes)
        .lower(lowering_platforms=(platform,))
        for platform in ("cuda", "tpu")
    }
    uses = {p: "ragged_dot" in module.as_text() for p, module in lowered.items()}
    assert uses == {"cuda": False, "tpu": True}
    gradient = jax.grad(lambda *args: grouped_product(*args).astype(jnp.float32).sum(), (0, 1))
    text = jax.jit(gradient).trace(*shapes, sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_dot" not in text
