"""Causal attention within the segments of packed rows, with a kernel per platform.

Packed rows hold several trajectories, numbered by `segment_ids` (0 is padding); a token attends
only to earlier tokens of its own segment. `attention` dispatches to splash attention (Pallas) on
TPU, a Pallas-Triton flash kernel on CUDA, and plain masked softmax elsewhere. The kernels are
opaque to XLA's partitioner, so they run under `shard_map` with rows over the batch axes, heads over
"tensor" and tokens over "sequence".

If rows are sharded over "sequence", splash and plain attention gather keys, values and segment ids,
and each device computes its own queries. This is exact, takes one gather per layer and does not
limit the number of shards by the number of heads; but the device with the last tokens of a row has
the most keys, so attention takes up to twice the mean time. The Triton kernel has no query offset:
there, an all-to-all exchanges tokens for heads, which is balanced but needs a number of heads
divisible by tensor x sequence.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manus_jax.models.architecture import Architecture, ModelError
from manus_jax.models.plain_attention import LONG_ROW, SAVED, plain_attention

Implementation = Literal["plain", "splash", "triton"]
BATCH_AXES = ("data", "fsdp")
KERNEL_BLOCK = 128  # accelerator kernels need row lengths that are a multiple of this


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """The kernel, and the mesh it is sharded over (None: a single device)."""

    implementation: Implementation = "plain"
    mesh: Mesh | None = None
    interpret: bool = False

    @property
    def sequence_shards(self) -> int:
        """The number of shards of a row's tokens."""
        return 1 if self.mesh is None else self.mesh.shape["sequence"]


def pick_implementation(platform: str) -> Implementation:
    """The kernel for a JAX platform: "cpu", "tpu", "cuda" or "gpu"."""
    return {"tpu": "splash", "cuda": "triton", "gpu": "triton"}.get(platform, "plain")  # type: ignore[return-value]


def check_platform(implementation: Implementation, mesh: Mesh) -> None:
    """Raises ModelError if the devices of the mesh cannot run the kernel."""
    platform = mesh.devices.flat[0].platform
    if implementation not in ("plain", pick_implementation(platform)):
        raise ModelError(
            f"compute.attention = {implementation!r} does not run on {platform} devices; set it to "
            "'auto' or 'plain'"
        )


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kernel: AttentionKernel,
    window: int | None = None,
) -> jax.Array:
    """Attention of `q` [rows, length, heads, dim] over `k`, `v` [rows, length, kv_heads, dim].

    `segment_ids` is int32 [rows, length]; `window` is the number of tokens that a token attends to,
    itself included (None: all of its segment). Returns [rows, length, heads, dim]; the values at
    padding (segment 0) are finite but meaningless. Residuals for remat policies are named `SAVED`.
    """
    if kernel.implementation == "plain":
        return _plain_attention(q, k, v, segment_ids, kernel, window)
    if kernel.implementation == "splash":
        return _splash_attention(q, k, v, segment_ids, kernel, window)
    assert window is None  # `check_window`
    return _triton_attention(q, k, v, segment_ids, kernel)


def check_window(arch: Architecture, implementation: Implementation) -> None:
    """Raises ModelError if the model has sliding windows and the kernel does not."""
    if arch.has_local_layers and implementation == "triton":
        raise ModelError(
            f"{arch.family} has sliding-window attention, which the GPU kernel does not compute; "
            "set compute.attention = 'plain'"
        )


def _sharded(
    run: Callable[..., jax.Array],
    mesh: Mesh,
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    head_axes: tuple[str, ...] = ("tensor",),
    constants: tuple[Any, ...] = (),
    constant_specs: tuple[Any, ...] = (),
) -> jax.Array:
    """`run(*constants, q, k, v, segment_ids)` on every device's shard of the arrays."""
    q, k, v, segment_ids = arrays
    parts = math.prod(mesh.shape[axis] for axis in head_axes)
    heads = PartitionSpec(BATCH_AXES, "sequence", "tensor", None)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(*constant_specs, heads, heads, heads, PartitionSpec(BATCH_AXES, "sequence")),
        out_specs=heads,
        check_vma=False,
    )(*constants, q, _at_least_heads(k, parts), _at_least_heads(v, parts), segment_ids)


def _at_least_heads(x: jax.Array, parts: int) -> jax.Array:
    """Repeats the heads of [rows, length, kv_heads, dim] if there are fewer than `parts`."""
    return x if x.shape[2] % parts == 0 else jnp.repeat(x, parts // x.shape[2], axis=2)


def _gather_tokens(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "sequence", axis=1, tiled=True)


def _plain_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kernel: AttentionKernel,
    window: int | None,
) -> jax.Array:
    mesh = kernel.mesh
    # Long rows are processed in a loop over blocks, whose rows XLA's partitioner would gather.
    partitioned = kernel.sequence_shards == 1 and q.shape[1] <= LONG_ROW
    if mesh is None or mesh.size == 1 or partitioned:
        return plain_attention(q, k, v, segment_ids, segment_ids, window=window)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        first = jax.lax.axis_index("sequence") * q.shape[1]
        k, v, all_segments = (_gather_tokens(x) for x in (k, v, segment_ids))
        return plain_attention(q, k, v, segment_ids, all_segments, first, window)

    return _sharded(run, mesh, (q, k, v, segment_ids))


def _splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kernel: AttentionKernel,
    window: int | None,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    mesh, shards = kernel.mesh, kernel.sequence_shards
    heads = q.shape[2] // (1 if mesh is None else mesh.shape["tensor"])
    splash = _splash_kernel(q.shape[1], heads, shards, window, kernel.interpret)
    to_heads = lambda x: x.transpose(0, 2, 1, 3)

    def run(
        splash: Any, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        all_segments = segment_ids
        if shards > 1:
            k, v, all_segments = (_gather_tokens(x) for x in (k, v, segment_ids))
        segments = library.SegmentIds(segment_ids, all_segments)
        out = jax.vmap(lambda q, k, v, s: splash(q, k, v, segment_ids=s))(
            to_heads(q) * q.shape[-1] ** -0.5, to_heads(k), to_heads(v), segments
        )
        return out.transpose(0, 2, 1, 3)

    if mesh is None:
        return run(splash, q, k, v, segment_ids)
    spec = splash.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, "sequence")))
    return _sharded(run, mesh, (q, k, v, segment_ids), constants=(splash,), constant_specs=(spec,))


def _splash_kernel(
    length: int, heads: int, shards: int, window: int | None, interpret: bool
) -> Any:
    """The splash kernel for rows of `length`, with queries in `shards` parts and `heads` heads.

    It is a pytree: with its `manual_sharding_spec`, `shard_map` passes each device the part of the
    mask for its own queries. Blocks outside of a window are skipped.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    if length % (KERNEL_BLOCK * shards):
        raise ValueError(
            f"splash attention needs a row length divisible by {KERNEL_BLOCK} x {shards} "
            f"sequence shards, not {length}"
        )
    block_q, block_kv = _largest_block(length // shards), _largest_block(length)
    sizes = library.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    mask: Any = library.CausalMask((length, length))
    if window is not None:
        mask = library.LocalMask((length, length), (window - 1, 0), offset=0)
    return library.make_splash_mha(
        library.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )


def _largest_block(length: int) -> int:
    return next(b for b in (512, 384, 256, KERNEL_BLOCK) if length % b == 0)


def _triton_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, kernel: AttentionKernel
) -> jax.Array:
    arrays, run = (q, k, v, segment_ids), functools.partial(_triton, interpret=kernel.interpret)
    if kernel.mesh is None:
        return run(*arrays)
    if kernel.sequence_shards == 1:
        return _sharded(run, kernel.mesh, arrays)
    exchange = functools.partial(jax.lax.all_to_all, axis_name="sequence", tiled=True)

    def exchanged(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        return exchange(run(q, k, v, _gather_tokens(segment_ids)), split_axis=1, concat_axis=2)

    return _sharded(exchanged, kernel.mesh, arrays, head_axes=("tensor", "sequence"))


def _triton(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, interpret: bool
) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import attention as kernel_lib

    _, length, heads, dim = q.shape
    if length % KERNEL_BLOCK:
        raise ValueError(
            f"the GPU kernel needs a row length divisible by {KERNEL_BLOCK}, not {length}"
        )
    repeat = lambda x: jnp.repeat(x, heads // x.shape[2], axis=2)
    out = kernel_lib.mha(
        q,
        repeat(k),
        repeat(v),
        segment_ids,
        sm_scale=dim**-0.5,
        causal=True,
        interpret=interpret,
    )
    # The logsumexp cannot be named, so the backward pass runs the forward kernel again.
    return checkpoint_name(out, SAVED)
