"""Gradients of stacked layers that are added to their sum layer by layer, in the backward pass.

With several micro-batches, differentiating a scan over the layers makes a copy of all weights in
the compute type, and then the gradients of all layers at once, to be added to the sum: 4 bytes per
parameter in bfloat16. Here a layer's weights are cast when the layer is computed, in both passes,
and its gradient goes straight into the sum. Only the layers' inputs are kept for the backward pass.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

_LAYERS = ("backbone", "layers")


@dataclasses.dataclass(frozen=True)
class WithSum:
    """A stack of weights [layers, …] and the sum of its gradients so far, float32.

    The gradient of the weights is then that sum and their own gradient.
    """

    value: jax.Array
    total: jax.Array


def attach(params: Any, sums: Any) -> Any:
    """The parameters of a model, whose layers get the sums of their gradients."""
    layers = {n: WithSum(x, layers_of(sums)[n]) for n, x in layers_of(params).items()}
    return with_layers(params, layers)


def layers_of(params: Any) -> Any:
    return params[_LAYERS[0]][_LAYERS[1]]


def with_layers(params: Any, layers: Any) -> Any:
    """A tree like `params` with other layers."""
    outer, inner = _LAYERS
    return {**params, outer: {**params[outer], inner: layers}}


def scan_with_sums(
    layer: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
    x: jax.Array,
    stacks: Mapping[str, WithSum],
    rest: Any,
    dtype: jnp.dtype,
) -> tuple[jax.Array, Any]:
    """`jax.lax.scan(layer, x, (weights, *rest))` with weights in `dtype`; see `WithSum`.

    `rest` is a tuple of arrays [layers, …] without gradients, or None.
    """
    weights = {name: stack.value for name, stack in stacks.items()}
    sums = {name: stack.total for name, stack in stacks.items()}
    cast = lambda tree: jax.tree.map(lambda w: w.astype(dtype), tree)

    @jax.custom_vjp
    def run(x: jax.Array, weights: Any, sums: Any, rest: Any) -> tuple[jax.Array, Any]:
        return forward(x, weights, sums, rest)[0]

    def forward(x: jax.Array, weights: Any, sums: Any, rest: Any) -> Any:
        def body(x: jax.Array, scanned: Any) -> tuple[jax.Array, Any]:
            y, out = layer(x, (cast(scanned[0]), *scanned[1]))
            return y, (out, x)

        y, (out, inputs) = jax.lax.scan(body, x, (weights, rest))
        return (y, out), (inputs, weights, sums, rest)

    def backward(kept: Any, cotangents: Any) -> Any:
        inputs, weights, sums, rest = kept

        def body(carry: Any, scanned: Any) -> tuple[Any, None]:
            d_y, sums = carry
            index, x, own, rest, d_out = scanned
            _, gradient = jax.vjp(lambda x, w: layer(x, (w, *rest)), x, cast(own))
            d_x, d_weights = gradient((d_y, d_out))

            def add(total: jax.Array, d_weight: jax.Array) -> jax.Array:
                old = jax.lax.dynamic_index_in_dim(total, index, keepdims=False)
                new = old + d_weight.astype(total.dtype)
                return jax.lax.dynamic_update_index_in_dim(total, new, index, 0)

            return (d_x, jax.tree.map(add, sums, d_weights)), None

        d_y, d_out = cotangents
        order = jnp.arange(inputs.shape[0])
        scanned = (order, inputs, weights, rest, d_out)
        (d_x, sums), _ = jax.lax.scan(body, (d_y, sums), scanned, reverse=True)
        return d_x, sums, None, None

    run.defvjp(forward, backward)
    return run(x, weights, sums, rest)
