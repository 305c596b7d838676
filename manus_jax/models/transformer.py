"""The decoder, written with plain arrays and einsum; layers are stacked and scanned.

Matrices keep Hugging Face's layout [out, in] with a leading layer axis, so converting a checkpoint
only slices. The NNX modules hold parameters; they are split once, during set-up, into a graph
definition and a nested dict of arrays, and only the dict is passed to `jit`. Not included: dropout,
KV caches (the engine has its own) and mixture of experts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import (
    BATCH_AXES,
    AttentionKernel,
    attention,
    pick_implementation,
)
from manus_jax.models.vocabulary import HIDDEN_AXES, embed_tokens

Params = dict[str, Any]
Products = Callable[..., Sequence[jax.Array]]
"""Maps x [..., in] and weights [out, in], … to one product [..., out] per weight."""


@dataclasses.dataclass(frozen=True)
class Compute:
    """How the forward pass is computed: type, rematerialisation and attention kernel."""

    dtype: str = "float32"
    remat: str = "full"
    kernel: AttentionKernel = dataclasses.field(default_factory=AttentionKernel)

    def __post_init__(self) -> None:
        if self.remat not in REMAT_POLICIES:
            known = ", ".join(REMAT_POLICIES)
            raise ValueError(f"unknown remat policy {self.remat!r} (known: {known})")

    @property
    def fuses_products(self) -> bool:
        """Whether products with the same input are fused: only on a single CPU device.

        Fusing copies weights. On a CPU this is faster; on accelerators it has not been measured,
        and sharded weights would have to be moved between devices.
        """
        mesh = self.kernel.mesh
        return self.kernel.implementation == "plain" and (mesh is None or mesh.size == 1)


def make_compute(dtype: str, remat: str, attention: str, mesh: Mesh) -> Compute:
    """The compute options for a mesh; attention "auto" takes the kernel of its platform."""
    if attention == "auto":
        attention = pick_implementation(mesh.devices.flat[0].platform)
    return Compute(dtype, remat, AttentionKernel(attention, mesh))  # type: ignore[arg-type]


# What is saved per layer for the backward pass. "full" saves only the layer's input and recomputes
# the layer; "offload" does the same, with the inputs in host memory; "attention" also saves the
# inputs and the output of attention; "minimal" saves the result of every matrix product; "none"
# saves everything.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "attention": jax.checkpoint_policies.save_only_these_names("q", "k", "v", "attention"),
    "minimal": jax.checkpoint_policies.save_only_these_names(
        "q", "k", "v", "attention", "attention_out", "gate", "up", "mlp_out"
    ),
    "none": None,
}


class Layers(nnx.Module):
    """The parameters of all layers, each stacked on a leading layer axis."""

    def __init__(self, arch: Architecture, rngs: nnx.Rngs):
        for name, shape in arch.layer_shapes.items():
            stacked = (arch.num_layers, *shape)
            if name.endswith("norm"):
                value = jnp.ones(stacked)
            elif name.endswith("bias"):
                value = jnp.zeros(stacked)
            else:
                value = arch.initializer_range * jax.random.normal(rngs.params(), stacked)
            setattr(self, name, nnx.Param(value))


def _matrix(arch: Architecture, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    """A random matrix [vocab, hidden]."""
    shape = (arch.vocab_size, arch.hidden_size)
    return nnx.Param(arch.initializer_range * jax.random.normal(rngs.params(), shape))


class Backbone(nnx.Module):
    """Embedding, layers and final norm: tokens to hidden states."""

    def __init__(self, arch: Architecture, compute: Compute, rngs: nnx.Rngs):
        self.arch = arch
        self.compute = compute
        self.embed = _matrix(arch, rngs)
        self.layers = Layers(arch, rngs)
        self.norm = nnx.Param(jnp.ones((arch.hidden_size,)))

    def __call__(
        self, input_ids: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Hidden states [rows, length, hidden] of int32 [rows, length] packed rows."""
        dtype = jnp.dtype(self.compute.dtype)
        rope = rope_angles(positions, self.arch)
        kernel = self.compute.kernel
        products = fused if self.compute.fuses_products else separate

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention(q, k, v, segment_ids, kernel)

        def layer(x: jax.Array, params: Params) -> tuple[jax.Array, None]:
            x = checkpoint_name(self._constrain(x), "layer_input")
            params = gather_matrices(params, kernel.mesh)
            x = block(params, x, rope, attend, self.arch, products)
            return x, None

        policy = REMAT_POLICIES[self.compute.remat]
        if policy is not None:
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        x = embed_tokens(self.embed[...], input_ids, dtype, kernel.mesh)
        stacked = jax.tree.map(lambda p: p.astype(dtype), nnx.to_pure_dict(nnx.state(self.layers)))
        x, _ = jax.lax.scan(layer, self._constrain(x), stacked)
        return rms_norm(x, self.norm[...], self.arch.norm_eps)

    def _constrain(self, x: jax.Array) -> jax.Array:
        mesh = self.compute.kernel.mesh
        if mesh is None:
            return x
        spec = PartitionSpec(BATCH_AXES, "sequence", None)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


class Transformer(nnx.Module):
    """A language model: the backbone and an LM head, which may be tied to the embedding."""

    def __init__(self, arch: Architecture, compute: Compute, rngs: nnx.Rngs):
        self.backbone = Backbone(arch, compute, rngs)
        self.lm_head = None if arch.tie_embeddings else _matrix(arch, rngs)

    def head(self) -> jax.Array:
        """The LM head [vocab, hidden], in the parameter type."""
        return (self.backbone.embed if self.lm_head is None else self.lm_head)[...]

    def __call__(
        self, input_ids: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Logits float32 [rows, length, vocab]; training never materialises them."""
        x = self.backbone(input_ids, segment_ids, positions)
        return jnp.einsum(
            "btd,vd->btv", x, self.head().astype(x.dtype), preferred_element_type=jnp.float32
        )


class Critic(nnx.Module):
    """The backbone with a scalar head; `values[t]` is the value of the state before token t."""

    def __init__(self, arch: Architecture, compute: Compute, rngs: nnx.Rngs):
        self.backbone = Backbone(arch, compute, rngs)
        self.value_head = nnx.Param(jnp.zeros((arch.hidden_size,)))

    def __call__(
        self, input_ids: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Values float32 [rows, length]; the value of token t is read from position t - 1."""
        x = self.backbone(input_ids, segment_ids, positions)
        values = jnp.einsum(
            "btd,d->bt", x, self.value_head[...].astype(x.dtype), preferred_element_type=jnp.float32
        )
        return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))


def gather_matrices(params: Params, mesh: Mesh | None) -> Params:
    """The parameters of a layer with all hidden columns on each device; gradients are scattered.

    Each matrix is then gathered once per pass. Otherwise XLA gathers some of them for every use.
    """
    if mesh is None or all(mesh.shape[axis] == 1 for axis in HIDDEN_AXES):
        return params

    def gather(name: str, x: jax.Array) -> jax.Array:
        if not name.endswith("_proj"):
            return x
        stored, used = PartitionSpec("tensor", HIDDEN_AXES), PartitionSpec("tensor", None)
        if name in ("o_proj", "down_proj"):
            stored, used = PartitionSpec(HIDDEN_AXES, "tensor"), PartitionSpec(None, "tensor")
        return _gather(x, NamedSharding(mesh, stored), NamedSharding(mesh, used))

    return {name: gather(name, x) for name, x in params.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(weight: jax.Array, stored: NamedSharding, used: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(weight, used)


def _gather_forward(
    weight: jax.Array, stored: NamedSharding, used: NamedSharding
) -> tuple[jax.Array, None]:
    return _gather(weight, stored, used), None


def _gather_backward(
    stored: NamedSharding, used: NamedSharding, _: None, d_weight: jax.Array
) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(d_weight, stored),)


_gather.defvjp(_gather_forward, _gather_backward)

_TERMS_PER_SUM = 256


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: jax.Array, weight: jax.Array, split_sum: bool = False) -> jax.Array:
    """`x` [..., in] times `weight` [out, in].

    `split_sum` accumulates parts of each sum separately, at least two and of at most 256 terms,
    which reduces rounding error.

    The backward pass forces its operands to be materialised. Otherwise XLA's CPU back end fuses the
    producer of an operand into the transposition for the weight gradient and recomputes it element
    by element.
    """
    product = functools.partial(jnp.einsum, "...i,oi->...o")
    if not split_sum:
        return product(x, weight)
    terms = x.shape[-1]
    parts = max(2, -(-terms // _TERMS_PER_SUM))
    ends = [terms * part // parts for part in range(parts + 1)]
    spans = [slice(*pair) for pair in itertools.pairwise(ends)]
    return functools.reduce(jnp.add, (product(x[..., s], weight[:, s]) for s in spans))


def _linear_forward(
    x: jax.Array, weight: jax.Array, split_sum: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return linear(x, weight, split_sum), (x, weight)


def _linear_backward(
    split_sum: bool, operands: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    x, d_out = jax.lax.optimization_barrier((x, d_out))
    leading = tuple(range(x.ndim - 1))
    d_x = jnp.einsum("...o,oi->...i", d_out, weight)
    return d_x, jnp.tensordot(d_out, x, axes=(leading, leading))


linear.defvjp(_linear_forward, _linear_backward)


def separate(x: jax.Array, *weights: jax.Array) -> Sequence[jax.Array]:
    """`linear` with each of `weights`."""
    return [linear(x, w) for w in weights]


def fused(x: jax.Array, *weights: jax.Array) -> Sequence[jax.Array]:
    """`linear` with the concatenated `weights`: one large product is faster than several.

    In float32, sums are split: CPU kernels add terms sequentially, and over 30 layers the logits
    were otherwise less accurate than torch's.
    """
    joined = weights[0] if len(weights) == 1 else jnp.concatenate(weights)
    ends = itertools.accumulate(w.shape[0] for w in weights)
    return jnp.split(linear(x, joined, x.dtype == jnp.float32), [*ends][:-1], axis=-1)


def block(
    params: Params,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    arch: Architecture,
    products: Products = separate,
    total: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """One decoder layer on `x` [rows, length, hidden]; `attend` receives rotated q, k and v.

    `products` multiplies one input with several weights: `separate`, or a faster equivalent.
    `total` adds the outputs of devices that each have a part of the heads and MLP columns.
    """
    h = rms_norm(x, params["input_norm"], arch.norm_eps)
    projected = products(h, params["q_proj"], params["k_proj"], params["v_proj"])
    if arch.qkv_bias:
        projected = [y + params[f"{n}_bias"] for n, y in zip("qkv", projected, strict=True)]
    heads = (y.reshape(*y.shape[:-1], -1, arch.head_dim) for y in projected)
    q, k, v = (checkpoint_name(y, n) for n, y in zip("qkv", heads, strict=True))
    if arch.qk_norm:
        q = rms_norm(q, params["q_norm"], arch.norm_eps)
        k = rms_norm(k, params["k_norm"], arch.norm_eps)
    attended = attend(rotate(q, rope), rotate(k, rope), v)
    (out,) = products(attended.reshape(*x.shape[:-1], -1), params["o_proj"])
    x = x + checkpoint_name(total(out), "attention_out")
    h = rms_norm(x, params["post_norm"], arch.norm_eps)
    gate, up = products(h, params["gate_proj"], params["up_proj"])
    gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
    (out,) = products(jax.nn.silu(gate) * up, params["down_proj"])
    return x + checkpoint_name(total(out), "mlp_out")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * (x32 * scale).astype(x.dtype)


def rope_angles(positions: jax.Array, arch: Architecture) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [rows, length, head_dim / 2], of int32 `positions`."""
    half = arch.head_dim // 2
    inverse = arch.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if arch.rope_scaling is not None:
        inverse = _llama3_frequencies(inverse, arch)
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles), jnp.sin(angles)


def _llama3_frequencies(inverse: jax.Array, arch: Architecture) -> jax.Array:
    """Divides low frequencies by `factor`, keeps high ones and interpolates in between."""
    s = arch.rope_scaling
    assert s is not None
    wavelength = 2 * jnp.pi / inverse
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inverse / s.factor + smooth * inverse


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates pairs (i, i + dim/2) of `x` [rows, length, heads, dim] by the position's angle."""
    cos, sin = (a[:, :, None, :] for a in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x.dtype)


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef[Any], Params]:
    """Splits a module into its static definition and a nested dict of arrays."""
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def abstract_model(
    kind: type[Transformer] | type[Critic], arch: Architecture, compute: Compute
) -> tuple[nnx.GraphDef[Any], Params]:
    """The definition and parameter shapes, without allocating memory."""
    return split_model(nnx.eval_shape(lambda: kind(arch, compute, nnx.Rngs(0))))


def init_params(
    kind: type[Transformer] | type[Critic],
    arch: Architecture,
    compute: Compute,
    seed: int,
    shardings: Any = None,
) -> Params:
    """Initialises parameters directly with `shardings`, a tree like the parameters."""

    def create(key: jax.Array) -> Params:
        return split_model(kind(arch, compute, nnx.Rngs(params=key)))[1]

    return jax.jit(create, out_shardings=shardings)(jax.random.key(seed))


def critic_from_policy(policy: Params) -> Params:
    """Critic parameters: a copy of the policy's backbone and a zero value head."""
    backbone = jax.tree.map(jnp.copy, policy["backbone"])
    return {"backbone": backbone, "value_head": jnp.zeros_like(backbone["norm"])}
