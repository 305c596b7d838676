"""Products of groups of rows with a matrix for each group, for mixtures of experts.

TPUs have `jax.lax.ragged_dot`. For other devices, XLA would expand it to a dense product of all
rows with all matrices. There, the rows of each group are padded to blocks, and a batched product
multiplies each block with the matrix of its group.
"""

import functools

import jax
import jax.numpy as jnp

LARGEST_BLOCK = 128


def grouped_product(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """`rows` [n, d], sorted by group, times the `matrices` [groups, d, f] of their groups.

    The first `sizes[0]` rows belong to group 0, and so on. Rows after those of the last group
    belong to none; their results are undefined.
    """
    # Blocks of the mean size of a group: larger ones are mostly padding.
    mean = max(1, -(-len(rows) // len(sizes)))
    block = min(LARGEST_BLOCK, 1 << (mean - 1).bit_length())
    return jax.lax.platform_dependent(
        rows,
        matrices,
        sizes,
        tpu=jax.lax.ragged_dot,
        default=lambda *args: blocked_product(*args, block),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def blocked_product(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array, block: int
) -> jax.Array:
    """`grouped_product` as one batched product of blocks."""
    return _forward(rows, matrices, sizes, block)[0]


def _forward(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array, block: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    group, source, place = _blocks(len(rows), sizes, block)
    out = jnp.einsum("bjd,bdf->bjf", _take(rows, source), matrices[group])
    return _take(out.reshape(-1, out.shape[-1]), place), (rows, matrices, sizes)


def _backward(
    block: int, saved: tuple[jax.Array, jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, matrices, sizes = saved
    group, source, place = _blocks(len(rows), sizes, block)
    d_blocks = _take(d_out, source)
    d_rows = jnp.einsum("bjf,bdf->bjd", d_blocks, matrices[group])
    products = jnp.einsum(
        "bjd,bjf->bdf", _take(rows, source), d_blocks, preferred_element_type=jnp.float32
    )
    d_matrices = jax.ops.segment_sum(products, group, len(sizes), indices_are_sorted=True)
    d_rows = _take(d_rows.reshape(-1, d_rows.shape[-1]), place)
    return d_rows, d_matrices.astype(matrices.dtype), None


blocked_product.defvjp(_forward, _backward)


def _blocks(n: int, sizes: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The group of each block, its rows [blocks, block], and the place of each row in the blocks.

    The number of blocks is the largest that `n` rows can need. Where there is no row or no place,
    the index is one past the last.
    """
    ends, counts = jnp.cumsum(sizes), -(-sizes // block)
    block_ends = jnp.cumsum(counts)
    numbers = jnp.arange(min(-(-n // block) + len(sizes), n))
    last = len(sizes) - 1
    group = jnp.minimum(jnp.searchsorted(block_ends, numbers, side="right"), last)
    within = numbers - (block_ends - counts)[group]
    source = (ends - sizes)[group][:, None] + within[:, None] * block + jnp.arange(block)
    source = jnp.where((source < ends[group][:, None]) & (within >= 0)[:, None], source, n)
    row = jnp.arange(n)
    row_group = jnp.minimum(jnp.searchsorted(ends, row, side="right"), last)
    place = (block_ends - counts)[row_group] * block + row - (ends - sizes)[row_group]
    return group, source, jnp.where(row < ends[-1], place, source.size)


def _take(rows: jax.Array, source: jax.Array) -> jax.Array:
    """`rows[source]`, with zeros where `source` is one past the last row."""
    return jnp.take(rows, source, axis=0, mode="fill", fill_value=0)
