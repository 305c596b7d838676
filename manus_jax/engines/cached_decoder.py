"""The decoder with a KV cache: prefill and decode programs.

The result for a token depends only on its own stream. Keys and values are first written to the
cache and then read in blocks at fixed positions, rows never mix, and masked positions add exact
zeros. Results therefore do not depend on how a prompt is chunked, on the slot, on other streams in
the batch, or on where a dispatch ends. Each block of each layer is a separate array, and layers are
unrolled, because a matrix product with a slice of an array copies the slice in every step. Blocks
double in size; blocks that no stream in the batch has reached are skipped.
"""

import dataclasses
import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from manus_jax.engines.protocol import EngineError
from manus_jax.engines.sampling import Controls, no_controls, sample
from manus_jax.models.architecture import Architecture
from manus_jax.models.plain_attention import MASK_VALUE
from manus_jax.models.transformer import Params, block, rms_norm, rope_angles

FIRST_BLOCK = 128
MAX_STOP_IDS = 8
NO_SLOT = 2**30

Weights = dict[str, Any]
Blocks = tuple[jax.Array, ...]
"""Consecutive blocks [slots, kv_heads, length, head_dim] of the keys (or values) of all slots."""
Cache = tuple[tuple[Blocks, Blocks], ...]
"""Keys and values of each layer."""
SoftmaxState = tuple[jax.Array, jax.Array, jax.Array]
"""Partial softmax: the maximum score, the sum of exponentials relative to it, the weighted sum."""


class Chunks(NamedTuple):
    """Chunks of token streams to prefill; a long stream may have several.

    `rows` int32 [rows] is the slot of each chunk. `tokens` and `positions` are int32 [rows, chunk];
    position -1 is padding.
    """

    rows: Any
    tokens: Any
    positions: Any


class Lanes(NamedTuple):
    """Streams to decode, one per lane; a lane with budget 0 is empty.

    Fields are [lanes]: `rows` is the slot, or None if lane i is slot i; `tokens` is the last token
    of the stream, which is not in the cache yet; `positions` is its position; `budget` is the
    number of tokens to generate. `stop_ids` is [lanes, MAX_STOP_IDS], padded with -1.
    """

    rows: Any
    tokens: Any
    positions: Any
    budget: Any
    stop_ids: Any
    controls: Controls


class Decoded(NamedTuple):
    """`tokens` and `log_probs` [steps, lanes], of which the first `counts` [lanes] are valid."""

    tokens: Any
    log_probs: Any
    counts: Any


@dataclasses.dataclass(frozen=True)
class CachedDecoder:
    """The compiled programs of one model, shared by all equal decoders.

    `slots` is a multiple of 16 (see `lane_sizes`). `max_steps` bounds the tokens per lane and call
    of `decode`. Programs donate the cache's buffers and return them.
    """

    arch: Architecture
    dtype: str
    slots: int
    max_length: int
    max_steps: int

    def new_cache(self) -> Cache:
        """An empty cache; EngineError if the device has less memory than it takes."""
        layers, dtype = self.arch.num_layers, jnp.dtype(self.dtype)
        shapes = [
            (self.slots, self.arch.num_kv_heads, length, self.arch.head_dim)
            for length in block_lengths(self.max_length)
        ]
        needed = 2 * layers * sum(map(math.prod, shapes)) * dtype.itemsize
        if needed > (memory := _device_memory()):
            raise EngineError(
                f"a KV cache of {self.slots} slots x {self.max_length} tokens takes "
                f"{needed / 2**30:,.1f} GiB, and the device has {memory / 2**30:,.1f} GiB: lower "
                "engine.slots or rollout.max_total_tokens"
            )
        part = lambda: tuple(jnp.zeros(shape, dtype, device=_device()) for shape in shapes)
        return tuple((part(), part()) for _ in range(layers))

    def weights(self, params: Params) -> Weights:
        """A copy of the policy's parameters in the compute type, with one dict per layer.

        The copy is needed even if the type is the same: the learner donates its buffers in every
        update.
        """
        return self._unstack(place(params))

    @functools.partial(jax.jit, static_argnums=0)
    def _unstack(self, params: Params) -> Weights:
        dtype = jnp.dtype(self.dtype)
        copy = lambda x: jnp.copy(x) if x.dtype == dtype else x.astype(dtype)
        backbone = params["backbone"]
        layers = [
            {name: copy(x[i]) for name, x in backbone["layers"].items()}
            for i in range(self.arch.num_layers)
        ]
        out = {name: copy(backbone[name]) for name in ("embed", "norm")}
        if not self.arch.tie_embeddings:
            out["lm_head"] = copy(params["lm_head"])
        return {**out, "layers": tuple(layers)}

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def fill(self, weights: Weights, cache: Cache, chunks: Chunks) -> Cache:
        """Writes the keys and values of the chunks; the last layer's output is not computed."""
        return self._forward(weights, cache, *chunks)[1]

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def copy(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Copies slot `source` to slot `target`."""

        def move(x: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(x, source, axis=0)
            return jax.lax.dynamic_update_index_in_dim(x, row, target, axis=0)

        return jax.tree.map(move, cache)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def decode(
        self, weights: Weights, cache: Cache, lanes: Lanes, steps: jax.Array
    ) -> tuple[Cache, Decoded]:
        """Decodes up to `steps` tokens per lane, fewer if a lane hits a stop id or its budget."""
        head = weights["embed" if self.arch.tie_embeddings else "lm_head"]
        width = lanes.tokens.shape[0]

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            i, cache, tokens, alive, out = state
            positions = jnp.where(alive, lanes.positions + i, -1)
            hidden, cache = self._forward(
                weights, cache, lanes.rows, tokens[:, None], positions[:, None]
            )
            logits = jnp.einsum(
                "vd,dr->vr",
                head,
                _transposed(hidden[:, 0]),
                preferred_element_type=jnp.float32,
            )
            tokens, log_probs = sample(logits, lanes.controls, positions + 1)
            counts = out.counts + alive
            stopped = jnp.any(tokens[:, None] == lanes.stop_ids, axis=1)
            out = Decoded(out.tokens.at[i].set(tokens), out.log_probs.at[i].set(log_probs), counts)
            return i + 1, cache, tokens, alive & ~stopped & (counts < lanes.budget), out

        empty = Decoded(
            jnp.zeros((self.max_steps, width), jnp.int32),
            jnp.zeros((self.max_steps, width), jnp.float32),
            jnp.zeros((width,), jnp.int32),
        )
        start = (jnp.int32(0), cache, lanes.tokens, lanes.budget > 0, empty)
        end = jax.lax.while_loop(lambda s: (s[0] < steps) & jnp.any(s[3]), step, start)
        return end[1], end[4]

    def _forward(
        self,
        weights: Weights,
        cache: Cache,
        rows: jax.Array | None,
        tokens: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states [rows, chunk, hidden] of the tokens, and the updated cache."""
        rope = rope_angles(positions, self.arch)
        x = jnp.take(weights["embed"], tokens, axis=0)
        layers = []
        for params, (keys, values) in zip(weights["layers"], cache, strict=True):
            written: list[Blocks] = []

            def attend(
                q: jax.Array,
                k: jax.Array,
                v: jax.Array,
                keys: Blocks = keys,
                values: Blocks = values,
                written: list[Blocks] = written,
            ) -> jax.Array:
                written += [write(keys, k, rows, positions), write(values, v, rows, positions)]
                return attend_cache(q, written[0], written[1], rows, positions)

            x = block(params, x, rope, attend, self.arch, _weights_first)
            layers.append((written[0], written[1]))
        return rms_norm(x, weights["norm"], self.arch.norm_eps), tuple(layers)


def _device() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.local_devices()[0])


def _device_memory() -> int:
    """Bytes of the device's memory, or of the host's for a CPU."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return statistics.get("bytes_limit", host)


def place(batch: Any) -> Any:
    """Puts arrays on the device explicitly, as a transfer guard requires."""
    return jax.device_put(batch, _device())


def _transposed(x: jax.Array) -> jax.Array:
    """Materialises the transpose [in, rows] of `x`, which XLA would fuse into the product."""
    return jax.lax.optimization_barrier(x.T)


def _weights_first(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
    """`separate` with the weights as the left operands.

    CPU kernels repack their right operand on every call. With few rows, repacking the weights would
    be most of the work.
    """
    columns = _transposed(x.reshape(-1, x.shape[-1]))
    ys = (jnp.einsum("oi,ir->or", w, columns) for w in weights)
    return [jax.lax.optimization_barrier(y).T.reshape(*x.shape[:-1], -1) for y in ys]


def write(blocks: Blocks, new: jax.Array, rows: jax.Array | None, positions: jax.Array) -> Blocks:
    """Writes `new` [rows, chunk, kv_heads, dim] at `positions` [rows, chunk] of the slots `rows`.

    Padding (position -1) is dropped.
    """
    row = (jnp.arange(new.shape[0]) if rows is None else rows)[:, None]
    written, start = [], 0
    for part in blocks:
        inside = positions - start
        places = jnp.where((inside < 0) | (inside >= part.shape[2]), part.shape[2], inside)
        written.append(part.at[row, :, places].set(new, mode="drop"))
        start += part.shape[2]
    return tuple(written)


def attend_cache(
    q: jax.Array, keys: Blocks, values: Blocks, rows: jax.Array | None, positions: jax.Array
) -> jax.Array:
    """Attention of `q` [rows, chunk, heads, dim] over the slots of `rows`, up to `positions`.

    Computed block by block with an online softmax; `positions` is [rows, chunk].
    """
    count, chunk, heads, dim = q.shape
    kv_heads = keys[0].shape[1]
    group = heads // kv_heads
    queries = (q * dim**-0.5).reshape(count, chunk, kv_heads, group, dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(count, kv_heads, group * chunk, dim)
    last = jnp.tile(positions, (1, group))[:, None, :, None]
    of_rows = lambda part: part if rows is None else part.at[rows].get(mode="clip")

    def scores_of(part: jax.Array) -> jax.Array:
        if chunk > 1:
            return jnp.einsum("rhmd,rhtd->rhmt", queries, part, preferred_element_type=jnp.float32)
        # As in `_weights_first`, the larger operand is on the left.
        right = jax.lax.optimization_barrier(queries.swapaxes(2, 3))
        scores = jnp.einsum("rhtd,rhdm->rhtm", part, right, preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(scores).swapaxes(2, 3)

    def add(carry: SoftmaxState, start: int, key: jax.Array, value: jax.Array) -> SoftmaxState:
        top, mass, out = carry
        visible = start + jnp.arange(key.shape[2]) <= last
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

    shape = queries.shape[:-1]
    carry: SoftmaxState = (
        jnp.full(shape, MASK_VALUE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )
    farthest, start = jnp.max(positions), 0
    for key, value in zip(keys, values, strict=True):
        reached = functools.partial(add, start=start, key=key, value=value)
        carry = (
            reached(carry)
            if start == 0
            else jax.lax.cond(farthest >= start, reached, lambda carry: carry, carry)
        )
        start += key.shape[2]
    _, mass, out = carry
    out = (out / mass[..., None]).reshape(count, kv_heads, group, chunk, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def block_lengths(max_length: int) -> tuple[int, ...]:
    """Block lengths of a cache: each as long as all before it, the last as long as needed."""
    lengths = [FIRST_BLOCK]
    while (total := sum(lengths)) < max_length:
        lengths.append(min(total, -(-(max_length - total) // FIRST_BLOCK) * FIRST_BLOCK))
    return tuple(lengths)


def lane_sizes(slots: int) -> tuple[int, ...]:
    """The numbers of lanes a dispatch may have, ascending; the last has a lane for every slot.

    CPU matrix products give a row the same bits for any number of rows that fills their tiles.
    """
    if slots <= 128:
        return (-(-slots // 16) * 16,)
    return (64, -(-slots // 64) * 64)


def empty_lanes(width: int, slots: int) -> Lanes:
    """Host arrays to fill in for a dispatch; a row past the last slot writes nothing."""
    return Lanes(
        rows=None if width == slots else np.full(width, NO_SLOT, np.int32),
        tokens=np.zeros(width, np.int32),
        positions=np.zeros(width, np.int32),
        budget=np.zeros(width, np.int32),
        stop_ids=np.full((width, MAX_STOP_IDS), -1, np.int32),
        controls=no_controls(width),
    )


def empty_chunks(rows: int, chunk: int) -> Chunks:
    """Like `empty_lanes`, for a prefill dispatch."""
    return Chunks(
        rows=np.full(rows, NO_SLOT, np.int32),
        tokens=np.zeros((rows, chunk), np.int32),
        positions=np.full((rows, chunk), -1, np.int32),
    )
