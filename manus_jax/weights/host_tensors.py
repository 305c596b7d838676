"""A learner's sharded parameters as tensors on the host, with Hugging Face names.

With a single process each tensor is assembled from the slices that the devices hold, already in
the type in which it is published, so nothing is gathered on a device and the host holds one tensor
at a time. With several processes `gather_to_host` collects the parameters on process 0 first.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from manus_jax.models.disk_params import host_tensor
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
    """Every tensor of the model by Hugging Face name; a tied head is not a tensor of its own."""
    return {
        name: Source(path, layer, TensorSpec(card.tensor_types[name], tuple(shape)))
        for name, path, layer, shape in tensor_map(card.architecture)
    }


def host_bytes(params: Any, source: Source) -> np.ndarray:
    """The bytes of a tensor, `[bytes]`, contiguous."""
    array: Any = params
    for key in source.path:
        array = array[key]
    tensor = host_tensor(array, source.layer, _DTYPES[source.spec.dtype])
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def gather_to_host(params: Any, keep: bool) -> Any:
    """The parameters as NumPy arrays where `keep`; with a single process, unchanged.

    With several processes all of them call this. Stacked layers are gathered one at a time, so a
    device holds at most one whole layer.
    """
    if jax.process_count() == 1:
        return params

    def gather(path: tuple[Any, ...], array: jax.Array) -> np.ndarray | None:
        if not any(key.key == "layers" for key in path):
            whole = np.asarray(_replicate(_mesh(array), False)(array, 0))
            return whole if keep else None
        result = np.empty(array.shape, array.dtype) if keep else None
        for layer in range(array.shape[0]):
            piece = np.asarray(_replicate(_mesh(array), True)(array, layer))
            if result is not None:
                result[layer] = piece
        return result

    return jax.tree_util.tree_map_with_path(gather, params)


def _mesh(array: jax.Array) -> Any:
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding.mesh


@functools.cache
def _replicate(mesh: jax.sharding.Mesh, stacked: bool) -> Any:
    def replicate(array: jax.Array, layer: int) -> jax.Array:
        if not stacked:
            return array
        return jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)

    return jax.jit(replicate, out_shardings=NamedSharding(mesh, PartitionSpec()))
