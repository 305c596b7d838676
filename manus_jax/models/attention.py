"""Causal attention that never crosses a segment boundary, on whatever chip there is.

Packed rows hold several trajectories; `segment_ids` tell them apart (0 is padding) and tokens only
see earlier tokens of their own segment. One function, `attention`, picks the kernel: splash
(Pallas) on TPU, a Pallas-Triton flash kernel on CUDA, plain masked softmax elsewhere. The kernels
are opaque to XLA's partitioner, so they run under `shard_map` with rows over the batch axes and
heads over "tensor".
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

Implementation = Literal["plain", "splash", "triton"]
BATCH_AXES = ("data", "fsdp")
NEGATIVE = -1e30
_QUERY_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """Which kernel runs, and the mesh it is sharded over (None: a single device)."""

    implementation: Implementation = "plain"
    mesh: Mesh | None = None
    interpret: bool = False


def pick_implementation(platform: str) -> Implementation:
    """The kernel for a platform as JAX names it: "cpu", "tpu", "cuda"/"gpu"."""
    return {"tpu": "splash", "cuda": "triton", "gpu": "triton"}.get(platform, "plain")  # type: ignore[return-value]


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, kernel: AttentionKernel
) -> jax.Array:
    """Attention of `q` [rows, length, heads, dim] over `k`, `v` [rows, length, kv_heads, dim].

    `segment_ids` is int32 [rows, length]. Returns [rows, length, heads, dim]. Padding positions
    (segment 0) hold finite values that mean nothing.
    """
    if kernel.implementation == "plain":
        return _plain(q, k, v, segment_ids)
    run = functools.partial(
        {"splash": _splash, "triton": _triton}[kernel.implementation], interpret=kernel.interpret
    )
    if kernel.mesh is None:
        return run(q, k, v, segment_ids)
    heads = PartitionSpec(BATCH_AXES, None, "tensor", None)
    return jax.shard_map(
        run,
        mesh=kernel.mesh,
        in_specs=(heads, heads, heads, PartitionSpec(BATCH_AXES, None)),
        out_specs=heads,
        check_vma=False,
    )(q, k, v, segment_ids)


def _plain(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Masked softmax over blocks of queries; a block never looks at keys that come after it."""
    rows, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(rows, length, kv_heads, heads // kv_heads, dim)
    block = _QUERY_BLOCK if length % _QUERY_BLOCK == 0 else length
    outputs = []
    for start in range(0, length, block):
        stop = start + block
        outputs.append(
            _softmax_block(
                q[:, start:stop],
                k[:, :stop],
                v[:, :stop],
                causal_segment_mask(segment_ids, start, stop),
            )
        )
    out = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)
    return out.reshape(rows, length, heads, dim)


def causal_segment_mask(segment_ids: jax.Array, start: int, stop: int) -> jax.Array:
    """True where query `start..stop` may see key `0..stop`: bool [rows, queries, keys]."""
    same = segment_ids[:, start:stop, None] == segment_ids[:, None, :stop]
    causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
    return same & causal


def _softmax_block(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """`q` [rows, queries, kv_heads, group, dim], `k`/`v` [rows, keys, kv_heads, dim].

    Queries are the minor axis of the scores: XLA's CPU back end reduces over keys in vectors then,
    and one number at a time otherwise.
    """
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("bqhgd,bkhd->bhgkq", q * scale, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask.swapaxes(1, 2)[:, None, None], scores, NEGATIVE)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-2, keepdims=True)))
    total = weights.sum(axis=-2).transpose(0, 3, 1, 2)[..., None]
    out = jnp.einsum("bhgkq,bkhd->bqhgd", weights.astype(v.dtype), v)
    return (out / total).astype(v.dtype)


def _splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, interpret: bool
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel_lib,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as mask_lib,
    )

    _, length, heads, dim = q.shape
    if length % 128:
        raise ValueError(f"splash attention needs a row length divisible by 128, not {length}")
    block = next(b for b in (512, 384, 256, 128) if length % b == 0)
    sizes = kernel_lib.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = mask_lib.MultiHeadMask([mask_lib.CausalMask((length, length))] * heads)
    splash = kernel_lib.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
    )
    k, v = _repeat_kv(k, heads), _repeat_kv(v, heads)
    to_heads = lambda x: x.transpose(0, 2, 1, 3)
    out = jax.vmap(lambda q, k, v, s: splash(q, k, v, segment_ids=kernel_lib.SegmentIds(s, s)))(
        to_heads(q) * dim**-0.5, to_heads(k), to_heads(v), segment_ids
    )
    return out.transpose(0, 2, 1, 3)


def _triton(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, interpret: bool
) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import attention as kernel_lib

    _, length, heads, dim = q.shape
    if length % 128:
        raise ValueError(f"the GPU kernel needs a row length divisible by 128, not {length}")
    return kernel_lib.mha(
        q,
        _repeat_kv(k, heads),
        _repeat_kv(v, heads),
        segment_ids,
        sm_scale=dim**-0.5,
        causal=True,
        interpret=interpret,
    )


def _repeat_kv(x: jax.Array, heads: int) -> jax.Array:
    return jnp.repeat(x, heads // x.shape[2], axis=2)
