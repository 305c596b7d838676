"""Parameters that stay on disk until they are used, one tensor at a time.

Converting, publishing and opening an engine use every tensor once. They accept a tree of parameters
whose leaves are `DiskArray`s, so that no device and no host process ever holds a float32 model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from manus_jax.models.lora import MergedArray

Index = tuple[int, ...]
"""A part of a stack: (), all of it; (layer,); or (layer, expert)."""


@dataclasses.dataclass(frozen=True)
class DiskArray:
    """A parameter on disk. `read` returns a part of it."""

    shape: tuple[int, ...]
    read: Callable[[Index], np.ndarray]


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array at a multiple of 64 bytes, which JAX's CPU devices take as it is."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def host_tensor(array: Any, index: Index, dtype: Any) -> np.ndarray:
    """A parameter, or a part of a stack, on this host in `dtype`.

    `array` is a `DiskArray`, a NumPy array, or a JAX array (or `MergedArray` of such) whose shards
    are all on this process's devices; a JAX array is cast shard by shard on its devices.
    """
    if isinstance(array, MergedArray):
        array, index = array.layer(*index), ()
    if isinstance(array, DiskArray):
        return array.read(index).astype(dtype, copy=False)
    if isinstance(array, np.ndarray):
        return array[index].astype(dtype, copy=False)
    tensor = np.empty(array.shape[len(index) :], dtype)
    for where, piece in _pieces(array, index):
        tensor[where] = np.asarray(_cast(piece, dtype))
    return tensor


def cast_on_host(array: Any, index: Index, dtype: Any) -> np.ndarray:
    """`host_tensor` as a new array, of which a CPU device needs no copy of its own."""
    if isinstance(array, DiskArray):
        source = array.read(index)  # cast below, so that it is in memory in two types at most
    else:
        source = host_tensor(array, index, dtype)
    tensor = aligned_empty(source.shape, dtype)
    tensor[...] = source
    return tensor


def _pieces(array: jax.Array, index: Index) -> Iterator[tuple[Any, jax.Array]]:
    for shard in array.addressable_shards:
        spans = [part.indices(size) for part, size in zip(shard.index, array.shape, strict=True)]
        held = all(span[0] <= i < span[1] for i, span in zip(index, spans, strict=False))
        if shard.replica_id != 0 or not held:
            continue
        piece = shard.data
        for i, span in zip(index, spans, strict=False):
            piece = _part_of(piece, i - span[0])
        yield shard.index[len(index) :], piece


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(piece: jax.Array, dtype: Any) -> jax.Array:
    return piece.astype(dtype)


@jax.jit
def _part_of(stack: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
