"""A learner's sharded parameters as tensors on the host, with Hugging Face names.

With a single process each tensor is assembled from the slices that the devices hold, already in
the type in which it is published, so nothing is gathered on a device and the host holds one tensor
at a time. With several processes `gather_to_host` collects the parameters on process 0 first, also
in the type in which they are used there.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from manus_jax.models.disk_params import Index, host_tensor
from manus_jax.models.huggingface import ModelCard, tensor_map
from manus_jax.models.lora import MergedArray
from manus_jax.weights.manifest import TensorSpec

_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a tensor comes from: a path into the parameters, and a part of a stack."""

    path: tuple[str, ...]
    index: Index
    spec: TensorSpec


def tensor_sources(card: ModelCard) -> dict[str, Source]:
    """Every tensor of the model by Hugging Face name; a tied head is not a tensor of its own."""
    return {
        name: Source(path, index, TensorSpec(card.tensor_types[name], tuple(shape)))
        for name, path, index, shape in tensor_map(card.architecture)
    }


def host_bytes(params: Any, source: Source) -> np.ndarray:
    """The bytes of a tensor, `[bytes]`, contiguous."""
    array: Any = params
    for key in source.path:
        array = array[key]
    tensor = host_tensor(array, source.index, _DTYPES[source.spec.dtype])
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def types_of(card: ModelCard, dtype: str | None = None) -> dict[tuple[str, ...], Any]:
    """The type in which each parameter leaves the learner: `dtype`, or that of its tensors."""
    found: dict[tuple[str, ...], Any] = {}
    for source in tensor_sources(card).values():
        own = jnp.dtype(dtype or _DTYPES[source.spec.dtype])
        if found.setdefault(source.path, own) != own:  # tensors of one stack differ
            found[source.path] = jnp.dtype(jnp.float32)
    return found


def gather_to_host(
    params: Any, keep: bool, types: Mapping[tuple[str, ...], Any] | None = None
) -> Any:
    """The parameters as NumPy arrays where `keep`; with a single process, unchanged.

    With several processes all of them call this. Each array is cast to its entry in `types`, if
    given, before it is gathered, so that hosts send and process 0 holds no more than is used.
    Stacked layers are gathered one at a time, so a device holds at most one whole layer.
    """
    if jax.process_count() == 1:
        return params

    def gather(path: tuple[Any, ...], array: Any) -> np.ndarray | None:
        names = tuple(key.key for key in path)
        merged = isinstance(array, MergedArray)
        dtype = (types or {}).get(names, jnp.dtype(jnp.float32) if merged else array.dtype)
        if "layers" not in names:
            return receive(_replicate(array.sharding, False, dtype)(array, 0))
        result = np.empty(array.shape, dtype) if keep else None
        for layer in range(array.shape[0]):
            source = array.layer(layer) if merged else array
            piece = receive(_replicate(source.sharding, not merged, dtype)(source, layer))
            if result is not None:
                result[layer] = piece
        return result

    def receive(gathered: jax.Array) -> np.ndarray | None:
        gathered.block_until_ready()  # hosts that do not keep it need not fetch it
        return np.asarray(gathered) if keep else None

    return jax.tree_util.tree_map_with_path(gather, params)


@functools.cache
def _replicate(source: NamedSharding, stacked: bool, dtype: Any) -> Any:
    def replicate(array: jax.Array, layer: int) -> jax.Array:
        spec = source.spec
        if stacked:
            array = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
            spec = PartitionSpec(*source.spec[1:])
        # Otherwise XLA may gather it before it is cast.
        return jax.lax.with_sharding_constraint(
            array.astype(dtype), NamedSharding(source.mesh, spec)
        )

    return jax.jit(replicate, out_shardings=NamedSharding(source.mesh, PartitionSpec()))
