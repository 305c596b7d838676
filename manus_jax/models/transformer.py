"""The decoder, written with plain arrays and einsum; layers are stacked and scanned.

Matrices keep Hugging Face's layout [out, in] with a leading layer axis, so converting a checkpoint
only slices. The NNX modules hold parameters; they are split once, during set-up, into a graph
definition and a nested dict of arrays, and only the dict is passed to `jit`. Not included: dropout,
KV caches (the engine has its own).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
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
from manus_jax.models.experts import (
    ACTIVATIONS,
    Mixture,
    load_imbalance,
    mixture_of_experts,
    sharded_mixture,
)
from manus_jax.models.layer_gradients import WithSum, scan_with_sums
from manus_jax.models.lora import Lora, adapted_layer, adapted_products, initial_adapter, split
from manus_jax.models.rope import rope_angles, rotate
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
# the layer; "offload" does the same, with the inputs in host memory; "in_place" does the same, and
# adds gradients to their sum layer by layer (`layer_gradients`); "attention" also saves the
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
    "in_place": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("q", "k", "v", "attention"),
    "minimal": jax.checkpoint_policies.save_only_these_names(
        "q", "k", "v", "attention", "attention_out", "gate", "up", "mlp_out"
    ),
    "none": None,
}


class Layers(nnx.Module):
    """The parameters of all layers, each stacked on a leading layer axis."""

    def __init__(self, arch: Architecture, rngs: nnx.Rngs, lora: Lora | None = None):
        for name, shape in arch.layer_shapes.items():
            stacked = (arch.num_layers, *shape)
            if name.endswith("norm"):
                value = _unit_norm(arch, stacked)
            elif name.endswith("bias"):
                value = jnp.zeros(stacked)
            else:
                value = arch.initializer_range * jax.random.normal(rngs.params(), stacked)
            setattr(self, name, nnx.Param(value))
        for name, shape in lora.layer_shapes(arch).items() if lora else ():
            stacked = (arch.num_layers, *shape)
            setattr(self, name, nnx.Param(initial_adapter(name, rngs.params(), stacked)))


def _unit_norm(arch: Architecture, shape: tuple[int, ...]) -> jax.Array:
    """Weights of norms that multiply by one."""
    return jnp.zeros(shape) if arch.norm_plus_one else jnp.ones(shape)


def _matrix(arch: Architecture, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    """A random matrix [vocab, hidden]."""
    shape = (arch.vocab_size, arch.hidden_size)
    return nnx.Param(arch.initializer_range * jax.random.normal(rngs.params(), shape))


class Backbone(nnx.Module):
    """Embedding, layers and final norm: tokens to hidden states."""

    def __init__(
        self, arch: Architecture, compute: Compute, rngs: nnx.Rngs, lora: Lora | None = None
    ):
        self.arch = arch
        self.compute = compute
        self.lora = lora
        self.embed = _matrix(arch, rngs)
        self.layers = Layers(arch, rngs, lora)
        self.norm = nnx.Param(_unit_norm(arch, (arch.hidden_size,)))

    def __call__(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array,
        positions: jax.Array,
        routed_experts: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden states [rows, length, hidden] of int32 [rows, length] packed rows.

        With experts, `imbalance` is set to the mean of `load_imbalance` over the layers, and
        `routed_experts` [rows, length, layers, experts_per_token] are replayed (`experts.route`).
        """
        arch, kernel = self.arch, self.compute.kernel
        dtype = jnp.dtype(self.compute.dtype)
        rope = rope_angles(positions, arch)
        local_rope = rope_angles(positions, arch, local=True) if arch.has_local_layers else rope
        products = fused if self.compute.fuses_products else separate
        products = adapted_products(products, self.lora)
        all_experts = sharded_mixture(arch, kernel.mesh)
        attend = functools.partial(attention, segment_ids=segment_ids, kernel=kernel)
        attend_locally = functools.partial(attend, window=arch.sliding_window)

        def layer(
            x: jax.Array, scanned: tuple[Params, jax.Array | None, jax.Array | None]
        ) -> tuple[jax.Array, list[jax.Array]]:
            x = checkpoint_name(self._constrain(x), "layer_input")
            stored, is_local, replayed = scanned
            params = adapted_layer(gather_matrices(stored, kernel.mesh), self.lora)
            imbalance: list[jax.Array] = []

            def mixture(params: Mapping[str, Any], h: jax.Array) -> jax.Array:
                imbalance.append(load_imbalance(arch, params["router"], h, segment_ids > 0))
                return all_experts(params, h, replayed)

            angles, attended = rope, attend
            if is_local is not None:
                angles = jax.tree.map(functools.partial(jnp.where, is_local), local_rope, rope)
                attended = functools.partial(jax.lax.cond, is_local, attend_locally, attend)
            x = block(params, x, angles, attended, arch, products, mixture=mixture)
            return x, imbalance

        x = scaled(embed_tokens(self.embed[...], input_ids, dtype, kernel.mesh), arch)
        x, stored = self._constrain(x), nnx.to_pure_dict(nnx.state(self.layers))
        kinds = jnp.array(arch.local_layers) if arch.has_local_layers else None
        replayed = None if routed_experts is None else jnp.moveaxis(routed_experts, 2, 0)
        if isinstance(next(iter(stored.values())), WithSum):
            x, imbalance = scan_with_sums(layer, x, stored, (kinds, replayed), dtype)
        else:
            policy = REMAT_POLICIES[self.compute.remat]
            if policy is not None:
                layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
            stacked = jax.tree.map(lambda p: p.astype(dtype), stored)
            x, imbalance = jax.lax.scan(layer, x, (stacked, kinds, replayed))
        if imbalance:
            self.imbalance = nnx.Intermediate(imbalance[0].mean())
        return rms_norm(x, self.norm[...], arch)

    def _constrain(self, x: jax.Array) -> jax.Array:
        mesh = self.compute.kernel.mesh
        if mesh is None:
            return x
        spec = PartitionSpec(BATCH_AXES, "sequence", None)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


class Transformer(nnx.Module):
    """A language model: the backbone and an LM head, which may be tied to the embedding."""

    def __init__(
        self, arch: Architecture, compute: Compute, rngs: nnx.Rngs, lora: Lora | None = None
    ):
        self.backbone = Backbone(arch, compute, rngs, lora)
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

    def __init__(
        self, arch: Architecture, compute: Compute, rngs: nnx.Rngs, lora: Lora | None = None
    ):
        self.backbone = Backbone(arch, compute, rngs, lora)
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
        if name.startswith("expert_"):
            hidden = (HIDDEN_AXES, None) if name == "expert_down" else (None, HIDDEN_AXES)
            stored, used = PartitionSpec("tensor", *hidden), PartitionSpec("tensor")
            return _gather(x, NamedSharding(mesh, stored), NamedSharding(mesh, used))
        inwards = name.startswith(("o_proj", "down_proj"))
        if name.endswith("_proj"):
            stored, used = PartitionSpec("tensor", HIDDEN_AXES), PartitionSpec("tensor", None)
            if inwards:
                stored, used = PartitionSpec(HIDDEN_AXES, "tensor"), PartitionSpec(None, "tensor")
        elif name.endswith("_proj_lora_b" if inwards else "_proj_lora_a"):
            stored, used = PartitionSpec(None, HIDDEN_AXES), PartitionSpec(None, None)
            if inwards:
                stored = PartitionSpec(HIDDEN_AXES, None)
        else:
            return x
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
    mixture: Mixture | None = None,
) -> jax.Array:
    """One decoder layer on `x` [rows, length, hidden]; `attend` receives rotated q, k and v.

    `products` multiplies one input with several weights: `separate`, or a faster equivalent.
    `total` adds the outputs of devices that each have a part of the heads and MLP columns, or of
    the experts, whose output `mixture` computes.
    """
    h = rms_norm(x, params["input_norm"], arch)
    projected = products(h, params["q_proj"], params["k_proj"], params["v_proj"])
    if arch.qkv_bias:
        projected = [y + params[f"{n}_bias"] for n, y in zip("qkv", projected, strict=True)]
    heads = (y.reshape(*y.shape[:-1], -1, arch.head_dim) for y in projected)
    q, k, v = (checkpoint_name(y, n) for n, y in zip("qkv", heads, strict=True))
    if arch.qk_norm:
        q = rms_norm(q, params["q_norm"], arch)
        k = rms_norm(k, params["k_norm"], arch)
    attended = attend(rotate(q, rope, _extra_scale(arch)), rotate(k, rope), v)
    (out,) = products(attended.reshape(*x.shape[:-1], -1), params["o_proj"])
    out = checkpoint_name(total(out), "attention_out")
    x = x + (rms_norm(out, params["attention_out_norm"], arch) if arch.output_norms else out)
    h = rms_norm(x, params["post_norm"], arch)
    if arch.num_experts:
        out = (mixture or functools.partial(mixture_of_experts, arch))(params, h)
    else:
        gate, up = products(h, params["gate_proj"], params["up_proj"])
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        (out,) = products(ACTIVATIONS[arch.activation](gate) * up, params["down_proj"])
    out = checkpoint_name(total(out), "mlp_out")
    return x + (rms_norm(out, params["mlp_out_norm"], arch) if arch.output_norms else out)


def _extra_scale(arch: Architecture) -> float:
    """The scale of queries, of which attention applies `head_dim ** -0.5`."""
    return 1.0 if arch.query_scale is None else arch.query_scale * arch.head_dim**0.5


def scaled(embedded: jax.Array, arch: Architecture) -> jax.Array:
    """Embeddings times the model's scale, which is rounded to their type."""
    if arch.embed_scale == 1.0:
        return embedded
    return embedded * jnp.asarray(arch.embed_scale, embedded.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, arch: Architecture) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + arch.norm_eps)
    if arch.norm_plus_one:
        return (x32 * scale * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight.astype(x.dtype) * (x32 * scale).astype(x.dtype)


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef[Any], Params]:
    """Splits a module into its static definition and a nested dict of arrays."""
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def abstract_model(
    kind: type[Transformer] | type[Critic],
    arch: Architecture,
    compute: Compute,
    lora: Lora | None = None,
) -> tuple[nnx.GraphDef[Any], Params]:
    """The definition and parameter shapes, without allocating memory."""
    return split_model(nnx.eval_shape(lambda: kind(arch, compute, nnx.Rngs(0), lora)))


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


def init_adapters(
    kind: type[Transformer] | type[Critic],
    arch: Architecture,
    lora: Lora,
    seed: int,
    shardings: Any = None,
) -> Params:
    """Initialises what is trained with LoRA: adapters and, of a critic, the value head."""

    def create(key: jax.Array) -> Params:  # XLA removes the parameters that are not returned
        model = kind(arch, Compute(), nnx.Rngs(params=key), lora)
        return split_model(model)[1]

    return jax.jit(lambda key: split(create(key))[0], out_shardings=shardings)(jax.random.key(seed))


def critic_from_policy(policy: Params) -> Params:
    """Critic parameters: a copy of the policy's backbone and a zero value head."""
    backbone = jax.tree.map(jnp.copy, policy["backbone"])
    return {"backbone": backbone, "value_head": jnp.zeros_like(backbone["norm"])}
