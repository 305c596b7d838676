"""The engine's copy of the policy's weights, in its type and on its devices.

Tensors are taken one layer at a time and cast before they move, so no device ever holds more than
its share of the copy and one tensor. If the learner is on the same devices, everything happens
there; weights on the host, or on other devices, are sent to each device in the parts that it needs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from manus_jax.engines.layout import Layout, weight_spec
from manus_jax.models.disk_params import cast_on_host
from manus_jax.models.lora import MergedArray
from manus_jax.models.transformer import Params

_REPEATED = ("k_proj", "v_proj", "k_bias", "v_bias")


def copy_weights(layout: Layout, params: Params) -> dict[str, Any]:
    """A copy of the policy's parameters, with one dict per layer.

    The copy is needed even if type and devices are the same: the learner donates its buffers in
    every update.
    """
    backbone = params["backbone"]
    layers = tuple(
        {name: _copy(layout, name, x, layer) for name, x in backbone["layers"].items()}
        for layer in range(layout.arch.num_layers)
    )
    found = {**backbone, **params}
    return {n: _copy(layout, n, found[n], None) for n in layout.weight_shapes} | {"layers": layers}


def _copy(layout: Layout, name: str, x: Any, layer: int | None) -> jax.Array:
    if isinstance(x, MergedArray):
        assert layer is not None
        x, layer = x.layer(layer), None
    sharding = layout.sharding(*weight_spec(name))
    repeats = layout.kv_heads // layout.arch.num_kv_heads if name in _REPEATED else 1
    arguments = layout.dtype, repeats, layout.arch.head_dim
    if not _on_devices_of(layout, x):
        part = () if layer is None else (layer,)
        tensor = _convert(np, cast_on_host(x, part, jnp.dtype(layout.dtype)), *arguments)
        # Wait: pending transfers would keep several host copies alive.
        return jax.block_until_ready(jax.device_put(tensor, sharding))
    index = None if layer is None else jax.device_put(np.int32(layer), layout.sharding())
    return _converter(sharding, x.sharding, layer is not None, *arguments)(x, index)


def _convert(numpy: Any, x: Any, dtype: str, repeats: int, head_dim: int) -> Any:
    """`x` in `dtype`, with each key-value head repeated."""
    x = x if x.dtype == jnp.dtype(dtype) else x.astype(jnp.dtype(dtype))
    if repeats == 1:
        return x
    heads = x.reshape(-1, head_dim, *x.shape[1:])
    return numpy.repeat(heads, repeats, axis=0).reshape(-1, *x.shape[1:])


@functools.cache
def _converter(
    sharding: NamedSharding, source: Sharding, stacked: bool, *arguments: Any
) -> Callable[..., jax.Array]:
    """A program that takes one layer of an array, converts it, and moves it to `sharding`."""

    def convert(x: jax.Array, layer: jax.Array | None) -> jax.Array:
        if stacked:
            x = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
        x = x.astype(jnp.dtype(arguments[0]))
        if isinstance(source, NamedSharding):  # otherwise XLA may move it before it is cast
            spec = P(*source.spec[1:]) if stacked else source.spec
            x = jax.lax.with_sharding_constraint(x, NamedSharding(source.mesh, spec))
        return jnp.copy(_convert(jnp, x, *arguments))

    return jax.jit(convert, out_shardings=sharding)


def _on_devices_of(layout: Layout, x: Any) -> bool:
    """Whether a program on the engine's devices can read `x`: same devices, in the same order."""
    if not isinstance(x, jax.Array) or x.sharding.device_set != set(layout.mesh.devices.flat):
        return False
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        return list(sharding.mesh.devices.flat) == list(layout.mesh.devices.flat)
    return layout.mesh.size == 1
