"""Sums and means over the segments of packed rows.

Several sequences share one row. Sequence-level values (a mean log-ratio, a product of importance
ratios) are computed per segment and broadcast to the segment's tokens, so that callers remain
elementwise.
"""

import chex
import jax
import jax.numpy as jnp


def segment_total(
    x: chex.Array, mask: chex.Array, segment_ids: chex.Array, num_segments: int
) -> jax.Array:
    """Sum of `x` over the agent tokens (`mask`) of each token's segment; all [rows, length].

    Segment ids are ints, numbered per row in [0, num_segments).
    """
    chex.assert_rank([x, mask, segment_ids], 2)
    chex.assert_equal_shape([x, mask, segment_ids])
    chex.assert_type(segment_ids, int)

    def one_row(x_c: jax.Array, ids_c: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x_c, ids_c, num_segments)[ids_c]

    return jax.vmap(one_row)(jnp.where(jnp.asarray(mask, bool), x, 0.0), jnp.asarray(segment_ids))


def segment_mean(
    x: chex.Array, mask: chex.Array, segment_ids: chex.Array, num_segments: int
) -> jax.Array:
    """Mean of `x` over the agent tokens of each token's segment; 0 if there are none."""
    total = segment_total(x, mask, segment_ids, num_segments)
    count = segment_total(jnp.ones(x.shape, jnp.float32), mask, segment_ids, num_segments)
    return total / jnp.maximum(count, 1.0)
