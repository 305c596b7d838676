"""Causal attention within segments for long rows, which skips blocks of keys that no query reads.

A row of many short segments needs few of its blocks: none above the diagonal, and none of earlier
segments. For each block of queries, a loop runs over its key blocks, from the diagonal to the start
of the block's first segment. The number of its iterations depends on the segment ids, which are
data, so new batches compile nothing. The softmax is accumulated over the key blocks, and the
backward pass recomputes the weights from each query's logsumexp, as in flash attention. Scores have
queries minor for the reasons given in `plain_attention`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

MASK_VALUE = -1e30  # the score of masked keys
SAVED = "attention"  # the checkpoint name of the residuals, for remat policies
_BLOCK, _SMALLEST_BLOCK = 128, 32


def block_size(queries: int) -> int | None:
    """The largest usable block that divides the queries; None if there is none."""
    sizes = range(min(queries, _BLOCK), _SMALLEST_BLOCK - 1, -1)
    return next((size for size in sizes if queries % size == 0), None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    first: jax.Array,
    block: int,
) -> jax.Array:
    """Attention of `q` [rows, queries, heads, dim] over `k`, `v` [rows, keys, kv_heads, dim].

    The first query is at position `first` of the keys. `block` divides queries, keys and `first`.
    """
    return _forward(q, k, v, q_segments, kv_segments, first, block)[0]


def _forward(q, k, v, q_segments, kv_segments, first, block):  # type: ignore[no-untyped-def]
    keys, values = _key_blocks(k, block), _key_blocks(v, block)
    queries = _query_blocks(q * q.shape[-1] ** -0.5, k.shape[2], block)
    of_block = _block_inputs(q_segments, kv_segments, first, block)

    def attend(_: None, block_inputs: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q_block, (row, last, count, q_ids) = block_inputs

        def add(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            largest, total, out = state
            at = row, last - step
            scores = _scores(q_block, keys[at], q_ids, kv_blocks[at], step)
            new_largest = jnp.maximum(largest, scores.max(axis=1, keepdims=True))
            weights, decay = jnp.exp(scores - new_largest), jnp.exp(largest - new_largest)
            total = total * decay + weights.sum(axis=1, keepdims=True)
            added = jnp.einsum(
                "hkd,hkq->hdq",
                values[at],
                weights.astype(v.dtype),
                preferred_element_type=jnp.float32,
            )
            return new_largest, total, out * decay + added

        kv_heads, width, dim = q_block.shape
        none = jnp.zeros((kv_heads, 1, width), jnp.float32)
        start = none + MASK_VALUE, none, jnp.zeros((kv_heads, dim, width), jnp.float32)
        largest, total, out = jax.lax.fori_loop(0, count, add, start)
        return None, ((out / total).astype(v.dtype), largest + jnp.log(total))

    kv_blocks = _segment_blocks(kv_segments, block)
    _, (outs, lse) = jax.lax.scan(attend, None, (queries, of_block))
    out = checkpoint_name(_by_token(outs, q.shape, block), SAVED)
    lse = checkpoint_name(lse, SAVED)
    return out, (q, k, v, q_segments, kv_segments, first, out, lse)


def _backward(block, residuals, d_out):  # type: ignore[no-untyped-def]
    q, k, v, q_segments, kv_segments, first, out, lses = residuals
    kv_heads, scale = k.shape[2], q.shape[-1] ** -0.5
    keys, values = _key_blocks(k, block), _key_blocks(v, block)
    kv_blocks = _segment_blocks(kv_segments, block)
    # The term of the softmax gradient that all keys of a query share (sum of d_out * out).
    common = jnp.sum((d_out * out).astype(jnp.float32), axis=-1, keepdims=True)

    def attend(gradients: tuple[jax.Array, jax.Array], block_inputs: Any) -> Any:
        (q_block, d_block, common, lse), (row, last, count, q_ids) = block_inputs

        def add(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_queries, d_keys, d_values = state
            at = row, last - step
            scores = _scores(q_block, keys[at], q_ids, kv_blocks[at], step)
            weights = jnp.exp(scores - lse)
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            d_weights = product("hkd,hqd->hkq", values[at], d_block)
            d_scores = (weights * (d_weights - common.swapaxes(1, 2))).astype(k.dtype)
            return (
                d_queries + product("hkd,hkq->hdq", keys[at], d_scores),
                d_keys.at[at].add(product("hkq,hqd->hkd", d_scores, q_block)),
                d_values.at[at].add(product("hkq,hqd->hkd", weights.astype(v.dtype), d_block)),
            )

        none = jnp.zeros((kv_heads, q.shape[-1], q_block.shape[1]), jnp.float32)
        d_queries, *gradients = jax.lax.fori_loop(0, count, add, (none, *gradients))
        return tuple(gradients), (d_queries * scale).astype(q.dtype)

    blocks = functools.partial(_query_blocks, kv_heads=kv_heads, block=block)
    of_query = blocks(q * scale), blocks(d_out), blocks(common), lses
    of_block = _block_inputs(q_segments, kv_segments, first, block)
    none = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    (d_keys, d_values), d_queries = jax.lax.scan(attend, none, (of_query, of_block))
    by_token = lambda x, like: x.swapaxes(2, 3).reshape(like.shape).astype(like.dtype)
    d_q = _by_token(d_queries, q.shape, block)
    return d_q, by_token(d_keys, k), by_token(d_values, v), None, None, None


block_attention.defvjp(_forward, _backward)


def _key_blocks(x: jax.Array, block: int) -> jax.Array:
    """[rows, keys, kv_heads, dim] to [rows, blocks, kv_heads, block, dim]."""
    rows, _, kv_heads, dim = x.shape
    return x.reshape(rows, -1, block, kv_heads, dim).swapaxes(2, 3)


def _segment_blocks(segments: jax.Array, block: int) -> jax.Array:
    """[rows, keys] to [rows, blocks, block]."""
    return segments.reshape(len(segments), -1, block)


def _query_blocks(x: jax.Array, kv_heads: int, block: int) -> jax.Array:
    """[rows, queries, heads, dim] to [rows x blocks, kv_heads, group x block, dim]."""
    rows, queries, heads, dim = x.shape
    x = x.reshape(rows * queries // block, block, kv_heads, heads // kv_heads, dim)
    return x.transpose(0, 2, 3, 1, 4).reshape(len(x), kv_heads, -1, dim)


def _by_token(x: jax.Array, shape: tuple[int, ...], block: int) -> jax.Array:
    """The inverse of `_query_blocks`, for x [rows x blocks, kv_heads, dim, group x block]."""
    blocks, kv_heads, dim, width = x.shape
    x = x.reshape(blocks, kv_heads, dim, width // block, block)
    return x.transpose(0, 4, 1, 3, 2).reshape(shape)


def _block_inputs(
    q_segments: jax.Array, kv_segments: jax.Array, first: jax.Array, block: int
) -> tuple[jax.Array, ...]:
    """Of each block of queries: its row, its last key block, the number of its key blocks, and its
    segment ids [block].

    The first key block contains the first key with an id between those of the block's segments. A
    block of padding reads only itself.
    """
    q_ids = _segment_blocks(q_segments, block)
    rows, blocks, _ = q_ids.shape
    highest = q_ids.max(axis=2)[..., None]
    lowest = jnp.where(q_ids > 0, q_ids, highest[..., :1]).min(axis=2)[..., None]
    ids = kv_segments[:, None, :]
    start = jnp.argmax((ids >= lowest) & (ids <= highest), axis=2)
    last = jnp.broadcast_to(first // block + jnp.arange(blocks), (rows, blocks))
    count = jnp.where(highest[..., 0] > 0, last - start // block + 1, 1)
    row = jnp.broadcast_to(jnp.arange(rows)[:, None], (rows, blocks))
    return row.reshape(-1), last.reshape(-1), count.reshape(-1), q_ids.reshape(-1, block)


def _scores(q, k, q_ids, kv_ids, distance):  # type: ignore[no-untyped-def]
    """Masked scores, float32 [kv_heads, keys, group x block], of scaled queries.

    `distance`: how many blocks the keys are before the queries.
    """
    scores = jnp.einsum("hkd,hqd->hkq", k, q, preferred_element_type=jnp.float32)
    position = jnp.arange(len(q_ids))
    causal = (position[:, None] <= position[None, :]) | (distance > 0)
    mask = causal & (kv_ids[:, None] == q_ids[None, :])
    return jnp.where(jnp.tile(mask, (1, q.shape[1] // len(q_ids))), scores, MASK_VALUE)
