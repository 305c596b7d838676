"""Attention over the pages of the KV cache, and writing to them.

A page of each layer's keys (or values) consists of blocks, which are separate arrays because a
matrix product with a slice of an array copies the slice in every step. Blocks double in size;
blocks and pages that no stream in the batch has reached are skipped.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from manus_jax.models.plain_attention import MASK_VALUE

Blocks = tuple[jax.Array, ...]
"""Consecutive blocks [pages, kv_heads, length, head_dim] of the keys (or values) of all pages."""
SoftmaxState = tuple[jax.Array, jax.Array, jax.Array]
"""Partial softmax: the maximum score, the sum of exponentials relative to it, the weighted sum."""


def write(blocks: Blocks, new: jax.Array, pages: jax.Array | None, positions: jax.Array) -> Blocks:
    """Writes `new` [rows, chunk, kv_heads, dim] at `positions` [rows, chunk] of the rows' streams.

    `pages` [rows, columns] are the pages of each stream; None: row i has page i only. Padding
    (position -1) and what is beyond the last page are dropped.
    """
    length = sum(part.shape[2] for part in blocks)
    page, places = jnp.arange(new.shape[0])[:, None] if pages is None else pages, positions
    if pages is not None and pages.shape[1] > 1:
        page = jnp.take_along_axis(pages, jnp.maximum(positions, 0) // length, axis=1)
        places = jnp.where(positions < 0, -1, positions % length)
    written, start = [], 0
    for part in blocks:
        inside = places - start
        inside = jnp.where((inside < 0) | (inside >= part.shape[2]), part.shape[2], inside)
        written.append(part.at[page, :, inside].set(new, mode="drop"))
        start += part.shape[2]
    return tuple(written)


def attend_cache(
    q: jax.Array,
    keys: Blocks,
    values: Blocks,
    pages: jax.Array | None,
    positions: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Attention of `q` [rows, chunk, heads, dim] over the pages of its rows, up to `positions`.

    With a `window`, a token attends to that many tokens at most, itself included.

    Computed block by block with an online softmax; `positions` is [rows, chunk]. See `write` for
    `pages`.
    """
    count, chunk, heads, dim = q.shape
    kv_heads = keys[0].shape[1]
    group = heads // kv_heads
    queries = (q * dim**-0.5).reshape(count, chunk, kv_heads, group, dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(count, kv_heads, group * chunk, dim)
    last = jnp.tile(positions, (1, group))[:, None, :, None]
    length = sum(part.shape[2] for part in keys)

    def scores_of(part: jax.Array) -> jax.Array:
        if chunk > 1:
            return jnp.einsum("rhmd,rhtd->rhmt", queries, part, preferred_element_type=jnp.float32)
        # CPU kernels repack their right operand, so the larger one is on the left.
        right = jax.lax.optimization_barrier(queries.swapaxes(2, 3))
        scores = jnp.einsum("rhtd,rhdm->rhtm", part, right, preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(scores).swapaxes(2, 3)

    def add(
        carry: SoftmaxState, start: int | jax.Array, key: jax.Array, value: jax.Array, page: Any
    ) -> SoftmaxState:
        top, mass, out = carry
        of_rows = lambda part: part if page is None else part.at[page].get(mode="clip")
        places = start + jnp.arange(key.shape[2])
        visible = places <= last
        if window is not None:
            visible &= places > last - window
        scores = jnp.where(visible, scores_of(of_rows(key)), MASK_VALUE)
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - higher[..., None])
        shrink = jnp.exp(top - higher)
        added = jnp.einsum(
            "rhmt,rhtd->rhmd",
            weights.astype(value.dtype),
            of_rows(value),
            preferred_element_type=jnp.float32,
        )
        return higher, mass * shrink + weights.sum(axis=-1), out * shrink[..., None] + added

    def add_page(column: int | jax.Array, carry: SoftmaxState) -> SoftmaxState:
        page, inside = None if pages is None else pages[:, column], 0
        for key, value in zip(keys, values, strict=True):
            start = column * length + inside
            reached = functools.partial(add, start=start, key=key, value=value, page=page)
            carry = (
                reached(carry)
                if inside == 0
                else jax.lax.cond(farthest >= start, reached, lambda carry: carry, carry)
            )
            inside += key.shape[2]
        return carry

    shape = queries.shape[:-1]
    carry: SoftmaxState = (
        jnp.full(shape, MASK_VALUE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )
    farthest = jnp.max(positions)
    if pages is None or pages.shape[1] == 1:
        carry = add_page(0, carry)
    else:
        reached = jnp.maximum(farthest, 0) // length + 1
        carry = jax.lax.fori_loop(0, reached, add_page, carry)
    _, mass, out = carry
    out = (out / mass[..., None]).reshape(count, kv_heads, group, chunk, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
