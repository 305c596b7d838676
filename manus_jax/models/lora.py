"""LoRA: a low-rank change of linear layers over a frozen base model.

The product of an adapted layer is `x W^T + scale * (x A^T) B^T`, with A [rank, in] and
B [out, rank]. A and B are parameters of the layer besides W, named `q_proj_lora_a` and
`q_proj_lora_b` and stacked over the layers. They are trained in float32; W is kept in the type of
the computation and has neither gradients nor optimizer state. B starts at zero, so training starts
from the base.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from manus_jax.config.settings import LoraSettings
from manus_jax.models.architecture import Architecture, ModelError

_A, _B = "_lora_a", "_lora_b"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters of `rank` on the layers `targets`, such as `q_proj`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def layer_shapes(self, arch: Architecture) -> dict[str, tuple[int, int]]:
        """Shapes of the adapters of one layer by name."""
        shapes = {}
        for name in self.targets:
            outputs, inputs = arch.layer_shapes[name]
            shapes[name + _A], shapes[name + _B] = (self.rank, inputs), (outputs, self.rank)
        return shapes


def linear_layers(arch: Architecture) -> list[str]:
    """The layers that can have an adapter; they have the same names in Hugging Face models."""
    shapes = arch.layer_shapes.items()
    return [name for name, shape in shapes if name.endswith("_proj") and len(shape) == 2]


def make_lora(settings: LoraSettings, arch: Architecture) -> Lora | None:
    """The adapters of a model; None without LoRA. ModelError for a target that matches nothing."""
    if settings.rank is None:
        return None
    known = linear_layers(arch)
    targets = settings.target_modules
    named = known if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
    if unknown := [name for name in named if name not in known]:
        raise ModelError(
            f"lora.target_modules: {unknown[0]!r} matches no linear layer of the {arch.family} "
            f"model; choose 'all-linear' or from {', '.join(known)}"
        )
    return Lora(settings.rank, settings.alpha, tuple(n for n in known if n in named))


def initial_adapter(name: str, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A is uniform with the variance 1 / (3 * inputs), as in PEFT; B is zero."""
    if name.endswith(_B):
        return jnp.zeros(shape)
    limit = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, minval=-limit, maxval=limit)


class Adapted(NamedTuple):
    """The matrices of an adapted layer."""

    weight: jax.Array
    a: jax.Array
    b: jax.Array


def adapted_layer(params: dict[str, jax.Array], lora: Lora | None) -> dict[str, Any]:
    """The parameters of a layer, with `Adapted` in place of the weights that have an adapter."""
    if lora is None:
        return params
    found: dict[str, Any] = {n: x for n, x in params.items() if not n.endswith((_A, _B))}
    for name in lora.targets:
        found[name] = Adapted(params[name], params[name + _A], params[name + _B])
    return found


def adapted_products(
    products: Callable[..., Sequence[jax.Array]], lora: Lora | None
) -> Callable[..., Sequence[jax.Array]]:
    """`products` of an input with weights, some of which may be `Adapted`."""
    if lora is None:
        return products

    def multiply(x: jax.Array, *weights: Any) -> Sequence[jax.Array]:
        own = [w.weight if isinstance(w, Adapted) else w for w in weights]
        outputs = list(products(x, *own))
        # Not one product with the weights: its gradient would include that of the weights.
        adapters = {i: w for i, w in enumerate(weights) if isinstance(w, Adapted)}
        if adapters:
            low_rank = products(x, *(w.a for w in adapters.values()))
            for (i, w), low in zip(adapters.items(), low_rank, strict=True):
                (change,) = products(low, w.b)
                outputs[i] = outputs[i] + lora.scale * change
        return outputs

    return multiply


def split(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters that are trained with LoRA (adapters and value head), and the frozen ones."""
    trained: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, dict):
            parts = split(value)
            for side, part in zip((trained, frozen), parts, strict=True):
                if part:
                    side[name] = part
        else:
            side = trained if name.endswith((_A, _B)) or name == "value_head" else frozen
            side[name] = value
    return trained, frozen


def join(trained: dict[str, Any], *frozen: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `split`; without frozen parameters, `trained` itself."""
    if not frozen:
        return trained
    (rest,) = frozen
    joined = dict(rest)
    for name, value in trained.items():
        joined[name] = join(value, rest[name]) if name in rest else value
    return joined


class MergedArray:
    """The stack of an adapted layer's weights with its adapters added, made one layer at a time.

    `weight` [layers, out, in], `a` and `b` are JAX arrays that nothing may donate.
    """

    def __init__(self, weight: jax.Array, a: jax.Array, b: jax.Array, scale: float):
        self.weight, self.a, self.b, self.scale = weight, a, b, scale
        self.shape = weight.shape

    def layer(self, index: int) -> jax.Array:
        """One layer [out, in], float32, sharded like that of the base."""
        sharding = self.weight.sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
            sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
        place = jax.device_put(np.int32(index), _replicated(self.weight))
        merge = _merge_layer(sharding, self.scale)
        return merge(self.weight, self.a, self.b, place)


def _replicated(array: jax.Array) -> Any:
    sharding = array.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding


@functools.cache
def _merge_layer(sharding: Any, scale: float) -> Callable[..., jax.Array]:
    def merge(weight: jax.Array, a: jax.Array, b: jax.Array, index: jax.Array) -> jax.Array:
        take = lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
        return merged_weight(take(weight), take(a), take(b), scale)

    return jax.jit(merge, out_shardings=sharding)


def merged_weight(weight: Any, a: Any, b: Any, scale: float) -> Any:
    """`W + scale * B A` in float32; NumPy or JAX arrays [..., out, in]."""
    return weight.astype(np.float32) + np.float32(scale) * (b @ a)


def merge(base: dict[str, Any], adapters: dict[str, Any], lora: Lora) -> dict[str, Any]:
    """The parameters of a policy with `MergedArray`s for the adapted weights.

    The adapters are copied, because the learner donates them in every update.
    """
    changes = jax.tree.map(jnp.copy, adapters["backbone"]["layers"])
    layers = dict(base["backbone"]["layers"])
    for name in lora.targets:
        matrices = (layers[name], changes[name + _A], changes[name + _B])
        layers[name] = MergedArray(*matrices, lora.scale)
    return {**base, "backbone": {**base["backbone"], "layers": layers}}


def merged_params(base: dict[str, Any], adapters: dict[str, Any], lora: Lora) -> dict[str, Any]:
    """The parameters of a policy with merged weights as arrays, in the types of the base."""
    layers = dict(base["backbone"]["layers"])
    changes = adapters["backbone"]["layers"]
    for name in lora.targets:
        weight = layers[name]

        def add(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            return merged_weight(w, a, b, lora.scale).astype(w.dtype)

        added = jax.jit(add, out_shardings=weight.sharding)
        layers[name] = added(weight, changes[name + _A], changes[name + _B])
    return {**base, "backbone": {**base["backbone"], "layers": layers}}
