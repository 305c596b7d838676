"""Causal attention that never crosses a segment boundary, on whatever chip there is.

Packed rows hold several trajectories; `segment_ids` tell them apart (0 is padding) and tokens only
see earlier tokens of their own segment. One function, `attention`, picks the kernel: splash
(Pallas) on TPU, a Pallas-Triton flash kernel on CUDA, plain masked softmax elsewhere. The kernels
are opaque to XLA's partitioner, so they run under `shard_map` with rows over the batch axes, heads
over "tensor" and tokens over "sequence".

Where rows are split over "sequence", splash and plain gather keys, values and segment ids, and a
device computes its own queries: exact, one gather a layer, no limit by the number of heads. The
device with a row's last tokens sees the most keys, so attention (nothing else) takes up to twice
the mean's time. The Triton kernel knows no query offset: there, tokens are exchanged for heads
and back, which is balanced and asks for heads that divide by tensor x sequence.
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

from manus_jax.models.plain_attention import SAVED, plain_attention

Implementation = Literal["plain", "splash", "triton"]
BATCH_AXES = ("data", "fsdp")
KERNEL_BLOCK = 128  # what row lengths must be a multiple of, for the accelerators' kernels


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """Which kernel runs, and the mesh it is sharded over (None: a single device)."""

    implementation: Implementation = "plain"
    mesh: Mesh | None = None
    interpret: bool = False

    @property
    def sequence_shards(self) -> int:
        """Into how many parts the tokens of a row are split."""
        return 1 if self.mesh is None else self.mesh.shape["sequence"]


def pick_implementation(platform: str) -> Implementation:
    """The kernel for a platform as JAX names it: "cpu", "tpu", "cuda"/"gpu"."""
    return {"tpu": "splash", "cuda": "triton", "gpu": "triton"}.get(platform, "plain")  # type: ignore[return-value]


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, kernel: AttentionKernel
) -> jax.Array:
    """Attention of `q` [rows, length, heads, dim] over `k`, `v` [rows, length, kv_heads, dim].

    `segment_ids` is int32 [rows, length]. Returns [rows, length, heads, dim]. Padding positions
    (segment 0) hold finite values that mean nothing. What remat may keep of it is named `SAVED`.
    """
    run = {"plain": _plain_attention, "splash": _splash_attention, "triton": _triton_attention}
    return run[kernel.implementation](q, k, v, segment_ids, kernel)


def _sharded(
    run: Callable[..., jax.Array],
    mesh: Mesh,
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    head_axes: tuple[str, ...] = ("tensor",),
    constants: tuple[Any, ...] = (),
    constant_specs: tuple[Any, ...] = (),
) -> jax.Array:
    """`run(*constants, q, k, v, segment_ids)` on every device's part of the arrays."""
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
    """Key-value heads [rows, length, kv_heads, dim], repeated where there are fewer than parts."""
    return x if x.shape[2] % parts == 0 else jnp.repeat(x, parts // x.shape[2], axis=2)


def _gather_tokens(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "sequence", axis=1, tiled=True)


def _plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, kernel: AttentionKernel
) -> jax.Array:
    if kernel.mesh is None or kernel.sequence_shards == 1:
        return plain_attention(q, k, v, segment_ids, segment_ids)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        first = jax.lax.axis_index("sequence") * q.shape[1]
        k, v, all_segments = (_gather_tokens(x) for x in (k, v, segment_ids))
        return plain_attention(q, k, v, segment_ids, all_segments, first)

    return _sharded(run, kernel.mesh, (q, k, v, segment_ids))


def _splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, kernel: AttentionKernel
) -> jax.Array:
    mesh, shards = kernel.mesh, kernel.sequence_shards
    heads = q.shape[2] // (1 if mesh is None else mesh.shape["tensor"])
    splash = _splash_kernel(q.shape[1], heads, shards, kernel.interpret)

    def run(
        splash: Any, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        all_segments = segment_ids
        if shards > 1:
            k, v, all_segments = (_gather_tokens(x) for x in (k, v, segment_ids))
        return _splash(splash, q, k, v, segment_ids, all_segments)

    if mesh is None:
        return run(splash, q, k, v, segment_ids)
    spec = splash.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, "sequence")))
    return _sharded(run, mesh, (q, k, v, segment_ids), constants=(splash,), constant_specs=(spec,))


def _splash_kernel(length: int, heads: int, shards: int, interpret: bool) -> Any:
    """The kernel for rows of `length` whose queries are split into `shards`, for `heads` heads.

    It is a pytree: with its `manual_sharding_spec`, `shard_map` gives each device the part of the
    causal mask that belongs to its queries.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel_lib,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as mask_lib,
    )

    if length % (KERNEL_BLOCK * shards):
        raise ValueError(
            f"splash attention needs a row length divisible by {KERNEL_BLOCK} x {shards} "
            f"sequence shards, not {length}"
        )
    block_q, block_kv = _largest_block(length // shards), _largest_block(length)
    sizes = kernel_lib.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    mask = mask_lib.MultiHeadMask([mask_lib.CausalMask((length, length))] * heads)
    return kernel_lib.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )


def _largest_block(length: int) -> int:
    return next(b for b in (512, 384, 256, KERNEL_BLOCK) if length % b == 0)


def _splash(
    splash: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel_lib,
    )

    to_heads = lambda x: x.transpose(0, 2, 1, 3)
    segments = kernel_lib.SegmentIds(q_segments, kv_segments)
    out = jax.vmap(lambda q, k, v, s: splash(q, k, v, segment_ids=s))(
        to_heads(q) * q.shape[-1] ** -0.5, to_heads(k), to_heads(v), segments
    )
    return out.transpose(0, 2, 1, 3)


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
    # Its logsumexp cannot be named: where it was not kept, the kernel runs forward again.
    return checkpoint_name(out, SAVED)
