"""Sums over the segments of packed rows.

Several sequences share one row; what is sequence-level (a mean log-ratio, a product of importance
ratios) is computed per segment and handed back to each of the segment's tokens, so that callers
stay elementwise.
"""

import chex
import jax
import jax.numpy as jnp


def segment_total(
    x: chex.Array, mask: chex.Array, segment_ids: chex.Array, num_segments: int
) -> jax.Array:
    """Sum of `x` over the agent tokens of each token's own segment.

    Args:
      x: values, [rows, length].
      mask: agent tokens, [rows, length]; the others add nothing, whatever they hold.
      segment_ids: int, [rows, length], each row numbered on its own in [0, num_segments).
      num_segments: static bound on the segments in a row.

    Returns:
      [rows, length]: at each token the sum of its segment.
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
    """Mean of `x` over the agent tokens of each token's own segment, 0 where there are none.

    Shapes as in `segment_total`.
    """
    total = segment_total(x, mask, segment_ids, num_segments)
    count = segment_total(jnp.ones(x.shape, jnp.float32), mask, segment_ids, num_segments)
    return total / jnp.maximum(count, 1.0)
