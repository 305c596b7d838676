"""Sizes of the embedded engine on its devices: copies of the model, slots, and pages of the cache.

The devices form a mesh ("data", "tensor"). Along "tensor" they share one copy of the model: heads,
MLP columns and the vocabulary are split. Along "data" each group has its own copy of the weights,
its own slots and its own pages, so that streams never move between groups and only "tensor"
communicates. Weights are not split over "data": every step reads all of them, so a model that does
not fit needs a larger "tensor", not a gather per token.

Without a limit on its tokens, the cache has one page of the maximum length per slot. With a limit,
pages have 128 tokens, and a stream has as many as it needs.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manus_jax.engines.protocol import EngineError
from manus_jax.models.architecture import Architecture

PAGE = 128
NO_PAGE = 2**30


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of an engine. `slots` and `pages` are those of one copy of the model.

    `tile` is the number of rows of a matrix product that `lanes` are padded to.
    """

    arch: Architecture
    dtype: str
    mesh: Mesh
    slots: int
    max_length: int
    page_length: int
    pages: int
    tile: int

    @property
    def copies(self) -> int:
        return self.mesh.shape["data"]

    @property
    def tensor(self) -> int:
        return self.mesh.shape["tensor"]

    @property
    def columns(self) -> int:
        """The number of pages that a stream may have."""
        return -(-self.max_length // self.page_length)

    @property
    def lanes(self) -> tuple[int, ...]:
        """The numbers of lanes per copy that a decode dispatch may have, ascending.

        The last has a lane for every slot.
        """
        if self.slots <= 128:
            return (-(-self.slots // self.tile) * self.tile,)
        return (64, -(-self.slots // 64) * 64)

    @property
    def one_page_per_slot(self) -> bool:
        """Whether page i always belongs to slot i."""
        return self.columns == 1 and self.pages == self.lanes[-1]

    @property
    def kv_heads(self) -> int:
        """Key-value heads in the cache; they are repeated if there are fewer than devices."""
        return max(self.arch.num_kv_heads, self.tensor)

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the blocks of one layer's keys, over all copies."""
        return tuple(
            (self.copies * self.pages, self.kv_heads, length, self.arch.head_dim)
            for length in block_lengths(self.page_length)
        )

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights outside the layers."""
        matrix = (self.arch.vocab_size, self.arch.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"embed": matrix, "norm": matrix[1:]}
        return shapes if self.arch.tie_embeddings else {**shapes, "lm_head": matrix}

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        return dataclasses.replace(self.arch, num_kv_heads=self.kv_heads).layer_shapes

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on each device."""
        numbers = 2 * self.arch.num_layers * sum(map(math.prod, self.cache_shapes))
        return numbers * jnp.dtype(self.dtype).itemsize // self.mesh.size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on each device."""
        layers = [*self.layer_shapes.items()] * self.arch.num_layers
        numbers = sum(
            math.prod(self.sharding(*weight_spec(name)).shard_shape(shape))
            for name, shape in [*self.weight_shapes.items(), *layers]
        )
        return numbers * jnp.dtype(self.dtype).itemsize

    @property
    def device_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    def check_memory(self) -> None:
        """Raises EngineError if the cache needs more than the devices have."""
        statistics = self.mesh.devices.flat[0].memory_stats() or {}
        needed, memory = self.cache_bytes, statistics.get("bytes_limit")
        if memory is None:  # CPU devices share the memory of the host
            needed *= self.mesh.size
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            slots = self.slots * self.copies
            size = f"{slots} slots x {self.max_length} tokens"
            if not self.one_page_per_slot:
                size = f"{self.copies * self.pages * self.page_length} tokens"
            raise EngineError(
                f"a KV cache of {size} takes {needed / 2**30:,.1f} GiB, and the device has "
                f"{memory / 2**30:,.1f} GiB: lower engine.cache_tokens, engine.slots or "
                "rollout.max_total_tokens"
            )


def make_layout(
    arch: Architecture,
    devices: Sequence[Any],
    *,
    slots: int,
    max_length: int,
    tensor: int = 1,
    cache_tokens: int | None = None,
    dtype: str = "float32",
    platform: str | None = None,
) -> Layout:
    """The layout of an engine; EngineError if its sizes do not divide over the devices.

    Args:
      arch: the model's architecture.
      devices: in the order of the learner's mesh; neighbours share a copy of the model.
      slots: streams in the cache, over all copies.
      max_length: maximum number of tokens of a stream.
      tensor: devices per copy.
      cache_tokens: tokens in the cache, over all copies; None: `slots` x `max_length`.
      dtype: type of weights and cache.
      platform: of the devices, if `devices` are stand-ins for others.
    """
    if max_length > arch.max_positions:
        raise EngineError(
            f"max_length {max_length} exceeds the model's {arch.max_positions} positions"
        )
    _check_tensor(arch, len(devices), tensor)
    copies = len(devices) // tensor
    grid = np.array(devices, dtype=object).reshape(copies, tensor)
    mesh = Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sharing = f"{copies} copies of the model ({len(devices)} devices, tensor={tensor})"
    _require_multiple("engine.slots", slots, copies, sharing)
    whole = sum(block_lengths(max_length))
    # CPU matrix products give a row the same bits for any number of rows that fills their tiles.
    tile = 16 if (platform or devices[0].platform) == "cpu" else 1
    layout = Layout(arch, dtype, mesh, slots // copies, max_length, whole, pages=0, tile=tile)
    if cache_tokens is None or cache_tokens >= slots * whole:
        return dataclasses.replace(layout, pages=layout.lanes[-1])
    least = copies * -(-max_length // PAGE) * PAGE
    if cache_tokens < least:
        raise EngineError(
            f"engine.cache_tokens = {cache_tokens} cannot hold one stream of {max_length} tokens "
            f"in each of {sharing}; set engine.cache_tokens to at least {least}"
        )
    what = f"{sharing} x {PAGE} tokens per page = {copies * PAGE}"
    _require_multiple("engine.cache_tokens", cache_tokens, copies * PAGE, what)
    return dataclasses.replace(layout, page_length=PAGE, pages=cache_tokens // (copies * PAGE))


def _require_multiple(name: str, value: int, of: int, what: str) -> None:
    if value % of:
        below, above = value // of * of, -(-value // of) * of
        nearest = f"{below} or {above}" if below else f"{above}"
        raise EngineError(f"{name} = {value} is not divisible by {what}; set it to {nearest}")


def _check_tensor(arch: Architecture, devices: int, tensor: int) -> None:
    sizes = {
        "heads": arch.num_heads,
        "experts": arch.num_experts,
        "intermediate size": 0 if arch.num_experts else arch.intermediate_size,
        "vocabulary": arch.vocab_size,
    }

    def problem(parts: int) -> str | None:
        if devices % parts:
            return f"the {devices} devices are not divisible by it"
        for name, size in sizes.items():
            if size % parts:
                return f"the model's {name} ({size}) is not divisible by it"
        kv_heads = arch.num_kv_heads
        if kv_heads % parts and parts % kv_heads:
            return f"it neither divides the model's {kv_heads} key-value heads nor is a multiple"
        return None

    found = problem(tensor)
    if found is not None:
        valid = [parts for parts in range(1, devices + 1) if problem(parts) is None]
        nearest = min(valid, key=lambda parts: (abs(parts - tensor), parts))
        raise EngineError(f"engine.tensor = {tensor}: {found}; set engine.tensor to {nearest}")


def weight_spec(name: str) -> P:
    """How a weight is split: matrices [out, in] by output, or by input after a split output;
    experts are not divided."""
    if name.endswith(("norm", "router")):
        return P()
    return P(None, "tensor") if name in ("o_proj", "down_proj") else P("tensor")


def block_lengths(page_length: int) -> tuple[int, ...]:
    """Block lengths of a page: each as long as all before it, the last as long as needed."""
    lengths = [PAGE]
    while (total := sum(lengths)) < page_length:
        lengths.append(min(total, -(-(page_length - total) // PAGE) * PAGE))
    return tuple(lengths)


def split_devices(
    count: int, devices: Sequence[Any] | None = None
) -> tuple[list[Any] | None, list[Any]]:
    """The learner's devices, and the last `count` of process 0, which only the engine uses.

    `devices` are all of the job's, None: those of JAX. With `count` 0, the learner has all of them:
    `(devices, [])`.
    """
    if count == 0:
        return None if devices is None else list(devices), []
    everywhere = list(jax.devices() if devices is None else devices)
    first = [device for device in everywhere if device.process_index == 0]
    if count >= len(first):
        raise EngineError(
            f"engine.devices = {count} leaves the learner none of the {len(first)} devices of "
            "process 0"
            + ("; on a CPU, JAX_NUM_CPU_DEVICES=2 makes two" if first[0].platform == "cpu" else "")
        )
    own = first[-count:]
    return [device for device in everywhere if device not in own], own


def learner_devices(params: Any) -> list[Any]:
    """The devices of a learner's parameters, in the order of its mesh.

    For parameters on the host or on a single device: all devices of this process.
    """
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    if isinstance(sharding, NamedSharding):
        return list(sharding.mesh.devices.flat)
    return jax.local_devices()
