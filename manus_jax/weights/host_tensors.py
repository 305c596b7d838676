"""A learner's sharded parameters as Hugging Face tensors on the host, one at a time.

Each tensor is put together from the slices that the devices hold, already in the type in which it
is published, so nothing is gathered on a device and the host holds one tensor. Where a tensor's
slices lie on several hosts, that tensor alone is gathered; then all processes must call in step.
`SpreadTensor`s see to that where one process leads: whoever reads one makes the others take part.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from manus_jax.models.huggingface import ModelCard, tensor_map
from manus_jax.weights.manifest import TensorSpec

_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a tensor comes from: a path into the parameters, and a layer of a stack or None."""

    path: tuple[str, ...]
    layer: int | None
    spec: TensorSpec


def tensor_sources(card: ModelCard) -> dict[str, Source]:
    """Every tensor of the model by Hugging Face name; a tied head is no tensor of its own."""
    return {
        name: Source(path, layer, TensorSpec(card.tensor_types[name], tuple(shape)))
        for name, path, layer, shape in tensor_map(card.architecture)
    }


def host_bytes(params: Any, source: Source) -> np.ndarray:
    """The bytes of a tensor, `[bytes]`, contiguous."""
    array = _at(params, source.path)
    dtype = _DTYPES[source.spec.dtype]
    if isinstance(array, SpreadTensor):
        tensor = array.read(source.layer, np.dtype(dtype))
    elif array.is_fully_addressable:
        tensor = np.empty(source.spec.shape, dtype)
        for where, piece in _pieces(array, source.layer):
            tensor[where] = np.asarray(_cast(piece, dtype))
    else:
        tensor = gathered(params, source.path, source.layer, np.dtype(dtype))
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def gathered(params: Any, path: tuple[str, ...], layer: int | None, dtype: np.dtype) -> np.ndarray:
    """A parameter, or one layer of a stack, whole; all processes call in step."""
    array = _at(params, path)
    gather = _gathered(array.sharding.mesh, dtype, layer is not None)
    return np.asarray(gather(array, layer or 0))


@dataclasses.dataclass(frozen=True)
class SpreadTensor:
    """A parameter whose slices lie on several processes; reading it gathers it, a layer at a time.

    `read(layer, dtype)` must be called on one process only, which brings the others to take part.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    stacked: bool
    read: Callable[[int | None, np.dtype], np.ndarray]

    def __getitem__(self, layer: int) -> np.ndarray:
        return self.read(layer, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.stacked:
            return self.read(None, np.dtype(dtype or self.dtype))
        whole = np.empty(self.shape, dtype or self.dtype)
        for layer in range(self.shape[0]):
            whole[layer] = self.read(layer, whole.dtype)
        return whole


def spread(params: Any, together: Callable[..., AbstractContextManager[None]]) -> Any:
    """The parameters as `SpreadTensor`s, to be read within `together(do="gather", …)`.

    The other processes hear path, layer and dtype, and call `gathered` with these.
    """

    def tensor(key_path: tuple[Any, ...], array: jax.Array) -> SpreadTensor:
        path = tuple(key.key for key in key_path)

        def read(layer: int | None, dtype: np.dtype) -> np.ndarray:
            with together(do="gather", path=path, layer=layer, dtype=dtype.name):
                return gathered(params, path, layer, dtype)

        return SpreadTensor(array.shape, np.dtype(array.dtype), "layers" in path, read)

    return jax.tree_util.tree_map_with_path(tensor, params)


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


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


@functools.cache
def _gathered(mesh: jax.sharding.Mesh, dtype: Any, stacked: bool) -> Any:
    def gather(array: jax.Array, layer: int) -> jax.Array:
        return (_layer_of(array, layer) if stacked else array).astype(dtype)

    return jax.jit(gather, out_shardings=NamedSharding(mesh, PartitionSpec()))
