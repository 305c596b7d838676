"""Causal attention within segments by masked softmax, one block of queries at a time.

This implementation is for platforms without a dedicated kernel. Like flash attention, it saves each
query's logsumexp and the output for the backward pass, so that recomputing the weights takes only
the scores and one exponential. Internally, heads come before tokens, and queries that share a
key-value head are adjacent. Scores are [rows, kv_heads, keys, queries] with queries minor, because
XLA's CPU back end then vectorises the reduction over keys, and no product has to transpose scores.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from manus_jax.models.block_attention import MASK_VALUE, SAVED, block_attention, block_size

LONG_ROW = 512  # tokens; skipping blocks pays off in longer rows
_QUERY_BLOCK = 128


def plain_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    first: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Attention of `q` [rows, queries, heads, dim] over `k`, `v` [rows, keys, kv_heads, dim].

    The first query is at position `first` of the keys, a multiple of the number of queries. If it
    is None, queries and keys start at the same position, and a block only reads the keys up to its
    own end. Rows longer than LONG_ROW skip all other blocks that no query needs. With a `window`, a
    query attends to that many keys at most, its own position included, and no block is skipped.
    """
    start = jnp.zeros((), jnp.int32) if first is None else first
    block = block_size(q.shape[1])
    if k.shape[1] > LONG_ROW and block is not None and window is None:
        return block_attention(q, k, v, q_segments, kv_segments, start, block)
    return _attend(q, k, v, q_segments, kv_segments, start, first is None, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    first: jax.Array,
    aligned: bool,
    window: int | None,
) -> jax.Array:
    return _forward(q, k, v, q_segments, kv_segments, first, aligned, window)[0]


def _blocks(queries: int, keys: int, aligned: bool) -> list[tuple[slice, int]]:
    """Slices of the queries, with the number of keys that each has to read."""
    block = _QUERY_BLOCK if queries % _QUERY_BLOCK == 0 else queries
    starts = range(0, queries, block)
    return [(slice(s, s + block), s + block if aligned else keys) for s in starts]


def _by_head(x: jax.Array) -> jax.Array:
    """[rows, keys, kv_heads, dim] to [rows, kv_heads, keys, dim]."""
    return x.transpose(0, 2, 1, 3)


def _block_by_head(x: jax.Array, part: slice, kv_heads: int) -> jax.Array:
    """A block of [rows, queries, heads, dim] as [rows, kv_heads, group x block, dim]."""
    rows, _, heads, dim = x.shape
    x = x[:, part].reshape(rows, -1, kv_heads, heads // kv_heads, dim)
    return x.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)


def _block_by_token(x: jax.Array, block: int) -> jax.Array:
    """The inverse of `_block_by_head`, for x [rows, kv_heads, dim, group x block]."""
    rows, kv_heads, dim, queries = x.shape
    x = x.reshape(rows, kv_heads, dim, queries // block, block)
    return x.transpose(0, 4, 1, 3, 2).reshape(rows, block, -1, dim)


def _scores(q, k, q_segments, kv_segments, first, part, window):  # type: ignore[no-untyped-def]
    """Masked scores, float32 [rows, kv_heads, keys, group x block], of scaled queries."""
    scores = jnp.einsum("bhkd,bhqd->bhkq", k, q, preferred_element_type=jnp.float32)
    seen = k.shape[2]
    places = first + jnp.arange(part.start, part.stop)[None, :]
    causal = jnp.arange(seen)[:, None] <= places
    if window is not None:
        causal &= jnp.arange(seen)[:, None] > places - window
    mask = causal & (kv_segments[:, :seen, None] == q_segments[:, None, part])
    mask = jnp.tile(mask, (1, 1, q.shape[2] // mask.shape[2]))
    return jnp.where(mask[:, None], scores, MASK_VALUE)


def _forward(q, k, v, q_segments, kv_segments, first, aligned, window):  # type: ignore[no-untyped-def]
    keys, values = _by_head(k), _by_head(v)
    outs, lses = [], []
    for part, seen in _blocks(q.shape[1], k.shape[1], aligned):
        queries = _block_by_head(q, part, k.shape[2]) * q.shape[-1] ** -0.5
        scores = _scores(queries, keys[:, :, :seen], q_segments, kv_segments, first, part, window)
        largest = scores.max(axis=2, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=2, keepdims=True)
        out = jnp.einsum("bhkd,bhkq->bhdq", values[:, :, :seen], weights.astype(v.dtype))
        outs.append(_block_by_token((out / total).astype(v.dtype), part.stop - part.start))
        lses.append(largest + jnp.log(total))
    out = checkpoint_name(jnp.concatenate(outs, axis=1), SAVED)
    lse = checkpoint_name(jnp.stack(lses), SAVED)
    return out, (q, k, v, q_segments, kv_segments, first, out, lse)


def _backward(aligned, window, residuals, d_out):  # type: ignore[no-untyped-def]
    q, k, v, q_segments, kv_segments, first, out, lses = residuals
    keys, values, scale = _by_head(k), _by_head(v), q.shape[-1] ** -0.5
    # The term of the softmax gradient that all keys of a query share (sum of d_out * out).
    common = jnp.sum((d_out * out).astype(jnp.float32), axis=-1, keepdims=True)
    d_q, d_keys, d_values = [], jnp.zeros_like(keys), jnp.zeros_like(values)
    for (part, seen), lse in zip(_blocks(q.shape[1], k.shape[1], aligned), lses, strict=True):
        block = functools.partial(_block_by_head, part=part, kv_heads=k.shape[2])
        queries, d_block = block(q) * scale, block(d_out)
        scores = _scores(queries, keys[:, :, :seen], q_segments, kv_segments, first, part, window)
        weights = jnp.exp(scores - lse)
        d_weights = jnp.einsum(
            "bhkd,bhqd->bhkq", values[:, :, :seen], d_block, preferred_element_type=jnp.float32
        )
        d_scores = (weights * (d_weights - block(common).swapaxes(2, 3))).astype(k.dtype)
        d_queries = jnp.einsum("bhkd,bhkq->bhdq", keys[:, :, :seen], d_scores) * scale
        d_q.append(_block_by_token(d_queries, part.stop - part.start))
        d_keys = d_keys.at[:, :, :seen].add(jnp.einsum("bhkq,bhqd->bhkd", d_scores, queries))
        weights = weights.astype(v.dtype)
        d_values = d_values.at[:, :, :seen].add(jnp.einsum("bhkq,bhqd->bhkd", weights, d_block))
    return jnp.concatenate(d_q, axis=1), _by_head(d_keys), _by_head(d_values), None, None, None


_attend.defvjp(_forward, _backward)
