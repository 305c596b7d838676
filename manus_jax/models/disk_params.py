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


@dataclasses.dataclass(frozen=True)
class DiskArray:
    """A parameter on disk. `read` returns one layer of a stack, or for None the whole parameter."""

    shape: tuple[int, ...]
    read: Callable[[int | None], np.ndarray]


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array at a multiple of 64 bytes, which JAX's CPU devices take as it is."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def host_tensor(array: Any, layer: int | None, dtype: Any) -> np.ndarray:
    """A parameter, or one layer of a stack, on this host in `dtype`.

    `array` is a `DiskArray`, a NumPy array, or a JAX array whose shards are all on this process's
    devices; a JAX array is cast shard by shard on its devices.
    """
    if isinstance(array, DiskArray):
        return array.read(layer).astype(dtype, copy=False)
    if isinstance(array, np.ndarray):
        return (array if layer is None else array[layer]).astype(dtype, copy=False)
    tensor = np.empty(array.shape if layer is None else array.shape[1:], dtype)
    for where, piece in _pieces(array, layer):
        tensor[where] = np.asarray(_cast(piece, dtype))
    return tensor


def cast_on_host(array: Any, layer: int | None, dtype: Any) -> np.ndarray:
    """`host_tensor` as a new array, of which a CPU device needs no copy of its own."""
    if isinstance(array, DiskArray):
        source = array.read(layer)  # cast below, so that it is in memory in two types at most
    else:
        source = host_tensor(array, layer, dtype)
    tensor = aligned_empty(source.shape, dtype)
    tensor[...] = source
    return tensor


def _pieces(array: jax.Array, layer: int | None) -> Iterator[tuple[Any, jax.Array]]:
    for shard in array.addressable_shards:
        if shard.replica_id != 0:
            continue
        if layer is None:
            yield shard.index, shard.data
            continue
        first, last, _ = shard.index[0].indices(array.shape[0])
        if first <= layer < last:
            yield shard.index[1:], _layer_of(shard.data, layer - first)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(piece: jax.Array, dtype: Any) -> jax.Array:
    return piece.astype(dtype)


@jax.jit
def _layer_of(stack: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
