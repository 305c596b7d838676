"""The decoder over a cache of keys and values: filling it with tokens, and decoding from it.

The one idea: a token's result depends on its own stream and on nothing else. Keys and values are
written to the cache first and then read from it in blocks at fixed places, whether a token comes in
a prompt's chunk or is decoded, and rows never mix. So it makes no difference how a prompt is cut,
which slot it is in, what else runs beside it, or where a dispatch ends. The work of attention
follows the longest stream in the batch, not the length of the cache.

Layers are unrolled and each has arrays of its own, so that no step copies a slice of a stack.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manus_jax.learner.mesh import batch_shards, param_shardings, replicated
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import BATCH_AXES, NEGATIVE
from manus_jax.models.transformer import Params, block, rms_norm, rope_angles
from manus_jax.rollout.sampling import Controls, sample

KEY_BLOCK = 128
MAX_STOP_IDS = 8

Weights = dict[str, Any]
Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""Per layer, keys and values [slots, kv_heads, length, head_dim]."""


class Chunks(NamedTuple):
    """Tokens to be written to the cache: chunks of streams, several of one stream if it is long.

    `rows` int32 [rows] is each chunk's slot, `tokens` and `positions` are int32 [rows, chunk];
    position -1 is padding.
    """

    rows: Any
    tokens: Any
    positions: Any


class Lanes(NamedTuple):
    """Streams to be decoded, one per lane; a lane of budget 0 is empty.

    All are [lanes]: `rows` the slot, `tokens` the last token of the stream, which is not in the
    cache yet, `positions` its place, `budget` the number of tokens wanted; `stop_ids` is
    [lanes, MAX_STOP_IDS], padded with -1.
    """

    rows: Any
    tokens: Any
    positions: Any
    budget: Any
    stop_ids: Any
    controls: Controls


class Decoded(NamedTuple):
    """`tokens` and `log_probs` [steps, lanes]; a lane's first `counts` [lanes] of them are real."""

    tokens: Any
    log_probs: Any
    counts: Any


@dataclasses.dataclass(frozen=True)
class CachedDecoder:
    """The programs of one model; `fill`, `decode` and `copy` are meant to be jitted.

    `max_steps` bounds the tokens per lane that one call of `decode` may produce.
    """

    arch: Architecture
    dtype: str
    slots: int
    max_length: int
    max_steps: int
    mesh: Mesh | None = None

    def cache_sharding(self) -> Any:
        """Heads over "tensor"; slots over the batch axes where they divide."""
        if self.mesh is None:
            return None
        rows = BATCH_AXES if self.slots % batch_shards(self.mesh) == 0 else None
        heads = "tensor" if self.arch.num_kv_heads % self.mesh.shape["tensor"] == 0 else None
        return NamedSharding(self.mesh, P(rows, heads, None, None))

    def new_cache(self) -> Cache:
        length = -(-self.max_length // KEY_BLOCK) * KEY_BLOCK
        shape = (self.slots, self.arch.num_kv_heads, length, self.arch.head_dim)
        zeros = jax.jit(
            lambda: jnp.zeros(shape, jnp.dtype(self.dtype)), out_shardings=self.cache_sharding()
        )
        return tuple((zeros(), zeros()) for _ in range(self.arch.num_layers))

    def weights(self, params: Params) -> Weights:
        """A copy of the policy's parameters in the compute type, a dict per layer.

        A copy even where nothing changes: the learner gives its own buffers away at every update.
        """
        dtype = jnp.dtype(self.dtype)
        copy = lambda x: jnp.copy(x) if x.dtype == dtype else x.astype(dtype)

        def unstack(params: Params) -> Weights:
            backbone = params["backbone"]
            layers = [
                {name: copy(x[i]) for name, x in backbone["layers"].items()}
                for i in range(self.arch.num_layers)
            ]
            out = {"embed": copy(backbone["embed"]), "norm": copy(backbone["norm"])}
            if not self.arch.tie_embeddings:
                out["lm_head"] = copy(params["lm_head"])
            return {**out, "layers": tuple(layers)}

        if self.mesh is None:
            return jax.jit(unstack)(jax.device_put(params, jax.local_devices()[0]))
        shardings = param_shardings(params, self.mesh)
        return jax.jit(unstack, out_shardings=self._unstacked(shardings))(
            jax.device_put(params, shardings)
        )

    def _unstacked(self, shardings: Any) -> Any:
        """Where `weights` puts its arrays: as the learner does, without the layer axis."""
        backbone = shardings["backbone"]
        layer = {
            name: NamedSharding(s.mesh, P(*s.spec[1:])) for name, s in backbone["layers"].items()
        }
        out = {"embed": backbone["embed"], "norm": backbone["norm"]}
        if not self.arch.tie_embeddings:
            out["lm_head"] = shardings["lm_head"]
        return {**out, "layers": (layer,) * self.arch.num_layers}

    def place(self, batch: Any) -> Any:
        """Host arrays on the device, explicitly, as a transfer guard demands."""
        return jax.device_put(batch, None if self.mesh is None else replicated(self.mesh))

    def fill(self, weights: Weights, cache: Cache, chunks: Chunks) -> Cache:
        """Writes the chunks' keys and values. The last layer's output is never computed."""
        return self._forward(weights, cache, chunks.rows, chunks.tokens, chunks.positions)[1]

    def copy(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Writes all of slot `source` to slot `target`."""

        def move(x: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(x, source, axis=0)
            return jax.lax.dynamic_update_index_in_dim(x, row, target, axis=0)

        return jax.tree.map(move, cache)

    def decode(
        self, weights: Weights, cache: Cache, lanes: Lanes, steps: jax.Array
    ) -> tuple[Cache, Decoded]:
        """Up to `steps` tokens per lane, fewer where a lane meets a stop id or its budget."""
        head = weights["embed" if self.arch.tie_embeddings else "lm_head"]
        width = lanes.rows.shape[0]

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
        rows: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states [rows, chunk, hidden] of the tokens, and the cache that holds them."""
        rope = rope_angles(positions, self.arch)
        x = jnp.take(weights["embed"], tokens, axis=0)
        layers = []
        for params, (keys, values) in zip(weights["layers"], cache, strict=True):
            written: list[jax.Array] = []

            def attend(
                q: jax.Array,
                k: jax.Array,
                v: jax.Array,
                keys: jax.Array = keys,
                values: jax.Array = values,
                written: list[jax.Array] = written,
            ) -> jax.Array:
                written += [write(keys, k, rows, positions), write(values, v, rows, positions)]
                return attend_cache(q, written[0], written[1], rows, positions)

            x = block(params, x, rope, attend, self.arch, _weights_first)
            layers.append((written[0], written[1]))
        return rms_norm(x, weights["norm"], self.arch.norm_eps), tuple(layers)


def _transposed(x: jax.Array) -> jax.Array:
    """`x` [rows, in] as [in, rows] in memory; XLA would fold a plain transpose into the product."""
    return jax.lax.optimization_barrier(x.T)


def _weights_first(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`linear` with the weights as the left operand.

    CPU kernels repack their right operand on every call. With few rows to share the cost that
    would be most of the work if it were the weights.
    """
    y = jnp.einsum("oi,ir->or", weight, _transposed(x.reshape(-1, x.shape[-1])))
    return jax.lax.optimization_barrier(y).T.reshape(*x.shape[:-1], -1)


def write(cache: jax.Array, new: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Puts `new` [rows, chunk, kv_heads, dim] at `positions` [rows, chunk] of its rows' slots.

    Padding (position -1) is dropped.
    """
    places = jnp.where(positions < 0, cache.shape[2], positions)
    return cache.at[rows[:, None], :, places].set(new, mode="drop")


def attend_cache(
    q: jax.Array, keys: jax.Array, values: jax.Array, rows: jax.Array, positions: jax.Array
) -> jax.Array:
    """Causal attention of `q` [rows, chunk, heads, dim] over the slots that `rows` names.

    Goes through `keys` and `values` [slots, kv_heads, length, dim] in blocks, up to the highest of
    `positions` [rows, chunk], with a running softmax.
    """
    count, chunk, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    queries = (q * dim**-0.5).reshape(count, chunk, kv_heads, group, dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(count, kv_heads, group * chunk, dim)
    last = jnp.tile(positions, (1, group))[:, None, :, None]
    few = chunk == 1

    def window(x: jax.Array, start: jax.Array) -> jax.Array:
        size = (1, kv_heads, KEY_BLOCK, dim)
        return jax.vmap(lambda row: jax.lax.dynamic_slice(x, (row, 0, start, 0), size)[0])(rows)

    def scores_of(k: jax.Array) -> jax.Array:
        if not few:
            return jnp.einsum("rhmd,rhtd->rhmt", queries, k, preferred_element_type=jnp.float32)
        # As in `_weights_first`: the larger operand stays as it is.
        right = jax.lax.optimization_barrier(queries.swapaxes(2, 3))
        scores = jnp.einsum("rhtd,rhdm->rhtm", k, right, preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(scores).swapaxes(2, 3)

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, mass, out = carry
        start = i * KEY_BLOCK
        visible = start + jnp.arange(KEY_BLOCK) <= last
        scores = jnp.where(visible, scores_of(window(keys, start)), NEGATIVE)
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - higher[..., None])
        shrink = jnp.exp(top - higher)
        v = window(values, start)
        added = jnp.einsum(
            "rhmt,rhtd->rhmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return higher, mass * shrink + weights.sum(axis=-1), out * shrink[..., None] + added

    shape = queries.shape[:-1]
    start = (
        jnp.full(shape, NEGATIVE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )
    blocks = jnp.maximum(jnp.max(positions) // KEY_BLOCK + 1, 1)
    _, mass, out = jax.lax.fori_loop(0, blocks, body, start)
    out = (out / mass[..., None]).reshape(count, kv_heads, group, chunk, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def lane_sizes(slots: int) -> tuple[int, ...]:
    """How many lanes a dispatch may have, ascending; each is a compiled program.

    All are multiples of 16, for which CPU kernels give a row the same bits at every size.
    """
    widest = -(-slots // 16) * 16
    sizes = [16]
    while sizes[-1] * 4 < widest:
        sizes.append(sizes[-1] * 4)
    return (*sizes, widest) if sizes[-1] < widest else tuple(sizes)


def empty_lanes(width: int, slots: int) -> Lanes:
    """Host arrays for a dispatch, to be filled in; a row past the last slot writes nothing."""
    return Lanes(
        rows=np.full(width, slots, np.int32),
        tokens=np.zeros(width, np.int32),
        positions=np.zeros(width, np.int32),
        budget=np.zeros(width, np.int32),
        stop_ids=np.full((width, MAX_STOP_IDS), -1, np.int32),
        controls=Controls(
            temperature=np.ones(width, np.float32),
            top_p=np.ones(width, np.float32),
            top_k=np.zeros(width, np.int32),
            min_p=np.zeros(width, np.float32),
            seeds=np.zeros((width, 2), np.uint32),
        ),
    )


def empty_chunks(rows: int, chunk: int, slots: int) -> Chunks:
    """As `empty_lanes`."""
    return Chunks(
        rows=np.full(rows, slots, np.int32),
        tokens=np.zeros((rows, chunk), np.int32),
        positions=np.full((rows, chunk), -1, np.int32),
    )
