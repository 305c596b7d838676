"""The decoder with a KV cache: prefill and decode programs.

The result for a token depends only on its own stream. Keys and values are first written to the
cache and then read in blocks at fixed positions, rows never mix, and masked positions add exact
zeros. Results therefore do not depend on how a prompt is chunked, on the slot, on other streams in
the batch, or on where a dispatch ends. Layers are unrolled, because a matrix product with a slice
of a stacked array copies the slice in every step.

On several devices, the programs run under `shard_map`: each copy of the model has its own lanes and
pages, and only the sums over "tensor" are communicated.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from manus_jax.engines.layout import NO_PAGE, Layout, weight_spec
from manus_jax.engines.paged_attention import Blocks, attend_cache, write
from manus_jax.engines.sampling import Controls, no_controls, sample
from manus_jax.models.experts import mixture_of_experts
from manus_jax.models.rope import rope_angles
from manus_jax.models.transformer import block, rms_norm, scaled

MAX_STOP_IDS = 8
# Rows per copy of the model and tokens per row of a prefill dispatch. The shape is fixed: another
# one would sum in another order and make results depend on timing.
PREFILL_SHAPE = (8, 64)

Weights = dict[str, Any]
Cache = tuple[tuple[Blocks, Blocks], ...]
"""Keys and values of each layer."""
_PAGES = P("data", "tensor")  # of blocks [pages, kv_heads, length, head_dim]
_ROWS = P("data")


class Chunks(NamedTuple):
    """Chunks of token streams to prefill; a long stream may have several.

    `pages` int32 [rows, columns] are the pages of each chunk's stream, numbered per copy of the
    model. `tokens` and `positions` are int32 [rows, chunk]; position -1 is padding.
    """

    pages: Any
    tokens: Any
    positions: Any


class Lanes(NamedTuple):
    """Streams to decode, one per lane; a lane with budget 0 is empty.

    Fields are [lanes]: `pages` is [lanes, columns] as in `Chunks`, or None if lane i has page i;
    `tokens` is the last token of the stream, which is not in the cache yet; `positions` is its
    position; `budget` is the number of tokens to generate. `stop_ids` is [lanes, MAX_STOP_IDS],
    padded with -1.
    """

    pages: Any
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

    `max_steps` bounds the tokens per lane and call of `decode`. Programs donate the cache's buffers
    and return them.
    """

    layout: Layout
    max_steps: int

    def programs(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """The jitted programs by name, each with abstract arguments: `program.lower(*arguments)`.

        Nothing is allocated, so they can be compiled for devices that are not present.
        """
        layout = self.layout
        on = lambda spec, shape, dtype=layout.dtype: jax.ShapeDtypeStruct(
            shape, dtype, sharding=layout.sharding(*spec)
        )
        of = lambda shapes: {name: on(weight_spec(name), s) for name, s in shapes.items()}
        layers = range(layout.arch.num_layers)
        weights = of(layout.weight_shapes) | {
            "layers": tuple(of(layout.layer_shapes) for _ in layers)
        }
        half = tuple(on(_PAGES, shape) for shape in layout.cache_shapes)
        cache = tuple((half, half) for _ in layers)
        host = (empty_chunks(layout), empty_lanes(layout, layout.lanes[-1]))
        chunks, lanes = jax.tree.map(lambda x: on(_ROWS, x.shape, x.dtype), host)
        steps = on(P(), (), np.int32)
        return {
            "prefill": (CachedDecoder.fill, (self, weights, cache, chunks)),
            "decode": (CachedDecoder.decode, (self, weights, cache, lanes, steps)),
        }

    def new_cache(self) -> Cache:
        """An empty cache; EngineError if the devices have less memory than it takes."""
        self.layout.check_memory()
        sharding, dtype = self.layout.sharding(*_PAGES), jnp.dtype(self.layout.dtype)
        half = lambda: tuple(
            jnp.zeros(shape, dtype, device=sharding) for shape in self.layout.cache_shapes
        )
        return tuple((half(), half()) for _ in range(self.layout.arch.num_layers))

    def place(self, batch: Any, spec: P = _ROWS) -> Any:
        """Puts host arrays on the devices explicitly, as a transfer guard requires."""
        return jax.device_put(batch, self.layout.sharding(*spec))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def fill(self, weights: Weights, cache: Cache, chunks: Chunks) -> Cache:
        """Writes the keys and values of the chunks; the last layer's output is not computed."""
        run = self._on_mesh(
            lambda weights, cache, chunks: self._forward(weights, cache, *chunks)[1],
            (self._weight_specs, _PAGES, _ROWS),
            _PAGES,
        )
        return run(weights, cache, chunks)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def copy(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Copies pages `source` to pages `target`, [copies, columns]; NO_PAGE copies nothing."""

        def copy(cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
            def move(x: jax.Array) -> jax.Array:
                return x.at[target[0]].set(x.at[source[0]].get(mode="clip"), mode="drop")

            return jax.tree.map(move, cache)

        return self._on_mesh(copy, (_PAGES, _ROWS, _ROWS), _PAGES)(cache, source, target)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def decode(
        self, weights: Weights, cache: Cache, lanes: Lanes, steps: jax.Array
    ) -> tuple[Cache, Decoded]:
        """Decodes up to `steps` tokens per lane, fewer if a lane hits a stop id or its budget."""
        decoded = Decoded(P(None, "data"), P(None, "data"), _ROWS)
        run = self._on_mesh(
            self._decode, (self._weight_specs, _PAGES, _ROWS, P()), (_PAGES, decoded)
        )
        return run(weights, cache, lanes, steps)

    def _decode(
        self, weights: Weights, cache: Cache, lanes: Lanes, steps: jax.Array
    ) -> tuple[Cache, Decoded]:
        head = weights["embed" if self.layout.arch.tie_embeddings else "lm_head"]
        width = lanes.tokens.shape[0]

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            i, cache, tokens, alive, out = state
            positions = jnp.where(alive, lanes.positions + i, -1)
            hidden, cache = self._forward(
                weights, cache, lanes.pages, tokens[:, None], positions[:, None]
            )
            logits = jnp.einsum(
                "vd,dr->vr",
                head,
                _transposed(hidden[:, 0]),
                preferred_element_type=jnp.float32,
            )
            if self.layout.tensor > 1:
                logits = jax.lax.all_gather(logits, "tensor", tiled=True)
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
        pages: jax.Array | None,
        tokens: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states [rows, chunk, hidden] of the tokens, and the updated cache."""
        arch = self.layout.arch
        rope = rope_angles(positions, arch)
        local_rope = rope_angles(positions, arch, local=True) if arch.has_local_layers else rope
        x = scaled(self._embed(weights["embed"], tokens), arch)
        layers = []
        for layer, (params, (keys, values)) in enumerate(
            zip(weights["layers"], cache, strict=True)
        ):
            local = arch.has_local_layers and arch.local_layers[layer]
            window = arch.sliding_window if local else None
            written: list[Blocks] = []

            def attend(
                q: jax.Array,
                k: jax.Array,
                v: jax.Array,
                keys: Blocks = keys,
                values: Blocks = values,
                window: int | None = window,
                written: list[Blocks] = written,
            ) -> jax.Array:
                written += [write(keys, k, pages, positions), write(values, v, pages, positions)]
                return attend_cache(q, written[0], written[1], pages, positions, window)

            angles = local_rope if local else rope
            x = block(params, x, angles, attend, arch, _weights_first, self._total, self._mixture)
            layers.append((written[0], written[1]))
        return rms_norm(x, weights["norm"], arch), tuple(layers)

    def _embed(self, embed: jax.Array, tokens: jax.Array) -> jax.Array:
        if self.layout.tensor == 1:
            return jnp.take(embed, tokens, axis=0)
        local = tokens - jax.lax.axis_index("tensor") * embed.shape[0]
        found = jnp.take(embed, local, axis=0, mode="clip")
        held = (local >= 0) & (local < embed.shape[0])
        return self._total(jnp.where(held[..., None], found, 0))

    def _mixture(self, params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """The output of the experts on this device."""
        held = params["expert_gate"].shape[0]
        first = jax.lax.axis_index("tensor") * held if self.layout.tensor > 1 else 0
        return mixture_of_experts(self.layout.arch, params, x, first)

    def _total(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "tensor") if self.layout.tensor > 1 else x

    @property
    def _weight_specs(self) -> Weights:
        of = lambda shapes: {name: weight_spec(name) for name in shapes}
        layers = (of(self.layout.layer_shapes),) * self.layout.arch.num_layers
        return of(self.layout.weight_shapes) | {"layers": layers}

    def _on_mesh(
        self, run: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        mesh = self.layout.mesh
        if mesh.size == 1:
            return run
        return jax.shard_map(
            run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


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


def empty_lanes(layout: Layout, width: int) -> Lanes:
    """Host arrays to fill in for a dispatch of `width` lanes per copy; NO_PAGE writes nothing."""
    lanes = layout.copies * width
    fixed = layout.one_page_per_slot and width == layout.lanes[-1]
    return Lanes(
        pages=None if fixed else np.full((lanes, layout.columns), NO_PAGE, np.int32),
        tokens=np.zeros(lanes, np.int32),
        positions=np.zeros(lanes, np.int32),
        budget=np.zeros(lanes, np.int32),
        stop_ids=np.full((lanes, MAX_STOP_IDS), -1, np.int32),
        controls=no_controls(lanes),
    )


def empty_chunks(layout: Layout) -> Chunks:
    """Like `empty_lanes`, for a prefill dispatch."""
    rows, chunk = layout.copies * PREFILL_SHAPE[0], PREFILL_SHAPE[1]
    return Chunks(
        pages=np.full((rows, layout.columns), NO_PAGE, np.int32),
        tokens=np.zeros((rows, chunk), np.int32),
        positions=np.full((rows, chunk), -1, np.int32),
    )
