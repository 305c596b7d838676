"""Mixture of experts: a router chooses experts for each token, and grouped products compute them.

Tokens are sorted by expert, so that each matrix product (`grouped_product`) has the tokens of all
experts in groups. Experts are split over "tensor". The devices along it hold the same tokens;
each computes those that its own experts were chosen for, and the outputs are added, as for a dense
MLP whose columns are split. No token is dropped, and no capacity limits an expert.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import BATCH_AXES
from manus_jax.models.grouped_product import grouped_product

Mixture = Callable[[Mapping[str, Any], jax.Array], jax.Array]
"""Maps the parameters of a layer and its normed input to the output of the experts."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
_WEIGHTS = ("router", "expert_gate", "expert_up", "expert_down")


def router_probs(router: jax.Array, x: jax.Array) -> jax.Array:
    """The probabilities of the experts, float32 [..., experts], of `x` [..., hidden].

    Computed in float32: a rounded logit can choose another expert.
    """
    logits = jnp.einsum("...d,ed->...e", x.astype(jnp.float32), router.astype(jnp.float32))
    return jax.nn.softmax(logits)


def load_imbalance(
    arch: Architecture, router: jax.Array, x: jax.Array, real: jax.Array
) -> jax.Array:
    """How unequally the tokens of a batch use the experts of a layer; 1 if equally.

    The Switch Transformer's loss: experts x the sum over experts of the share of choices and the
    mean probability. `x` is [rows, length, hidden]; `real` [rows, length] excludes padding.
    """
    probs = router_probs(router, x)
    _, chosen = jax.lax.top_k(probs, arch.experts_per_token)
    uses = jax.nn.one_hot(chosen, arch.num_experts).sum(axis=-2) / arch.experts_per_token
    mean = lambda y: jnp.einsum("bte,bt->e", y, real.astype(y.dtype)) / jnp.maximum(real.sum(), 1)
    return arch.num_experts * jnp.sum(mean(uses) * mean(probs))


def route(
    arch: Architecture, router: jax.Array, x: jax.Array, replayed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The weights, float32, and numbers of each token's experts, [tokens, experts_per_token].

    Where `replayed` is not -1, these experts take the place of the most probable ones; their
    weights are still the router's.
    """
    probs = router_probs(router, x)
    weights, chosen = jax.lax.top_k(probs, arch.experts_per_token)
    if replayed is not None:
        chosen = jnp.where(replayed < 0, chosen, replayed)
        weights = jnp.take_along_axis(probs, chosen, axis=-1)
    if arch.normalize_experts:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, chosen


def mixture_of_experts(
    arch: Architecture,
    params: Mapping[str, Any],
    x: jax.Array,
    first: int | jax.Array = 0,
    replayed: jax.Array | None = None,
) -> jax.Array:
    """The output for `x` [..., hidden] of the experts in `params`, numbered from `first`.

    If these are not all experts, the outputs of the others have to be added. `replayed`
    [..., experts_per_token] are the experts to use (`route`).
    """
    tokens = x.reshape(-1, x.shape[-1])
    if replayed is not None:
        replayed = replayed.reshape(len(tokens), -1).astype(jnp.int32)
    weights, chosen = route(arch, params["router"], tokens, replayed)
    held = params["expert_gate"].shape[0]
    local = chosen.reshape(-1) - first
    is_held = (local >= 0) & (local < held)
    group = jnp.where(is_held, local, held)
    order = jnp.argsort(group, stable=True)
    inverse = jnp.argsort(order)
    sizes = jnp.bincount(group, length=held + 1)[:held].astype(jnp.int32)

    def product(rows: jax.Array, name: str) -> jax.Array:
        return grouped_product(rows, params[name].swapaxes(1, 2), sizes)

    rows = _permute(jnp.repeat(tokens, arch.experts_per_token, axis=0), order, inverse)
    gate = checkpoint_name(product(rows, "expert_gate"), "gate")
    up = checkpoint_name(product(rows, "expert_up"), "up")
    out = product(ACTIVATIONS[arch.activation](gate) * up, "expert_down")
    out = _permute(out, inverse, order).reshape(*chosen.shape, -1)
    # Rows of other devices' experts belong to no group; what the product has there is undefined.
    out = jnp.where(is_held.reshape(chosen.shape)[..., None], out, 0)
    summed = jnp.einsum("nkd,nk->nd", out, weights, preferred_element_type=jnp.float32)
    return summed.astype(x.dtype).reshape(x.shape)


@jax.custom_vjp
def _permute(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """`rows[order]`; the gradient is a gather with `inverse`, not a scatter."""
    return rows[order]


def _permute_forward(
    rows: jax.Array, order: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return rows[order], inverse


def _permute_backward(inverse: jax.Array, d_out: jax.Array) -> tuple[jax.Array, None, None]:
    return d_out[inverse], None, None


_permute.defvjp(_permute_forward, _permute_backward)


def sharded_mixture(
    arch: Architecture, mesh: Mesh | None
) -> Callable[[Mapping[str, Any], jax.Array, jax.Array | None], jax.Array]:
    """`mixture_of_experts` with experts over "tensor" and tokens over all other axes.

    The third argument are replayed experts [rows, length, experts_per_token], if any.
    """
    if mesh is None or mesh.size == 1:
        return lambda params, x, replayed: mixture_of_experts(arch, params, x, 0, replayed)

    def run(x: jax.Array, replayed: jax.Array | None, *weights: jax.Array) -> jax.Array:
        params = dict(zip(_WEIGHTS, weights, strict=True))
        first = jax.lax.axis_index("tensor") * params["expert_gate"].shape[0]
        return jax.lax.psum(mixture_of_experts(arch, params, x, first, replayed), "tensor")

    rows, experts = P(BATCH_AXES, "sequence", None), P("tensor")
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(rows, rows, P(), experts, experts, experts),
        out_specs=rows,
        check_vma=False,
    )
    return lambda params, x, replayed: mapped(x, replayed, *(params[n] for n in _WEIGHTS))
