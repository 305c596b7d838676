"""Embedding and LM head on a mesh.

Both are large [vocab, hidden] matrices, with the vocabulary sharded over "tensor" and hidden over
"fsdp" and "sequence". XLA's partitioner would gather them in the parameter type and all-reduce the
head's gradient once per chunk of positions. Under `shard_map`, the embedding lookup instead
exchanges tokens rather than the matrix, and the head is gathered once per micro-batch in the
compute type, with one reduce-scatter of its gradient in float32.

The TPU compiler has no reduce-scatter for all chips of a slice: it all-reduces and discards all but
one part, which sends twice as much. On TPUs the parts are therefore passed around a ring.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from manus_jax.models.attention import BATCH_AXES
from manus_jax.models.log_probs import token_log_probs

HIDDEN_AXES = ("fsdp", "sequence")
MATRIX = PartitionSpec("tensor", HIDDEN_AXES)
TOKENS = PartitionSpec(BATCH_AXES, "sequence")
Scatter = Callable[[jax.Array], jax.Array]
_TILE = 128  # the TPU copies arrays that are cut elsewhere


def embed_tokens(
    embed: jax.Array, input_ids: jax.Array, dtype: jnp.dtype, mesh: Mesh | None
) -> jax.Array:
    """Rows of `embed` [vocab, hidden] for int32 [rows, length]: `dtype` [rows, length, hidden]."""
    if mesh is None or mesh.size == 1:
        return jnp.take(embed, input_ids, axis=0).astype(dtype)

    def run(embed: jax.Array, input_ids: jax.Array) -> jax.Array:
        # Each device looks up its part of the hidden dimension for the tokens of all devices that
        # share the matrix; the all-to-all then returns every device the parts of its own tokens.
        all_ids = jax.lax.all_gather(input_ids.reshape(-1), HIDDEN_AXES)
        local, held = _local_ids(all_ids, embed.shape[0])
        parts = jnp.where(held[..., None], jnp.take(embed, local, axis=0).astype(dtype), 0)
        if mesh.shape["tensor"] > 1:
            parts = jax.lax.psum(parts, "tensor")
        whole = jax.lax.all_to_all(parts, HIDDEN_AXES, split_axis=0, concat_axis=2, tiled=True)
        return whole.reshape(*input_ids.shape, -1)

    return jax.shard_map(
        run, mesh=mesh, in_specs=(MATRIX, TOKENS), out_specs=TOKENS, check_vma=False
    )(embed, input_ids)


def _local_ids(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Token ids relative to the device's vocabulary shard, and whether they are in it."""
    local = ids - jax.lax.axis_index("tensor") * size
    held = (local >= 0) & (local < size)
    return jnp.where(held, local, 0), held


def sharded_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    input_ids: jax.Array,
    mask: jax.Array,
    mesh: Mesh | None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`token_log_probs` of arrays [rows, length, …] sharded over `mesh` like batches."""
    if mesh is None or mesh.size == 1:
        return token_log_probs(hidden, head, input_ids, mask, temperature, with_entropy)
    log_probs_of = functools.partial(
        token_log_probs,
        temperature=temperature,
        with_entropy=with_entropy,
        token_axes=(*BATCH_AXES, "sequence"),
        vocab_axis="tensor" if mesh.shape["tensor"] > 1 else None,
    )
    scatter = ring_scatter if mesh.devices.flat[0].platform == "tpu" else _psum_scatter

    def run(
        hidden: jax.Array, head: jax.Array, input_ids: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        whole = _gather_head(head, str(hidden.dtype), scatter)
        if mesh.shape["sequence"] == 1:
            return log_probs_of(hidden, whole, input_ids, mask)
        longer = _prepend_neighbour(hidden, input_ids, mask, mesh.shape["sequence"])
        log_probs, entropies = log_probs_of(longer[0], whole, *longer[1:])
        return log_probs[:, 1:], entropies[:, 1:]

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(TOKENS, MATRIX, TOKENS, TOKENS),
        out_specs=(TOKENS, TOKENS),
        check_vma=False,
    )(hidden, head, input_ids, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_head(head: jax.Array, dtype: str, scatter: Scatter) -> jax.Array:
    """Gathers the head [vocab, hidden] from [vocab, hidden / parts], rounded to `dtype`.

    The result has the parameter type, so that its gradient does too; XLA removes the double cast.
    """
    part = head.astype(dtype)
    return jax.lax.all_gather(part, HIDDEN_AXES, axis=1, tiled=True).astype(head.dtype)


def _gather_head_forward(head: jax.Array, dtype: str, scatter: Scatter) -> tuple[jax.Array, None]:
    return _gather_head(head, dtype, scatter), None


def _gather_head_backward(
    dtype: str, scatter: Scatter, _: None, d_whole: jax.Array
) -> tuple[jax.Array]:
    return (scatter(d_whole),)


_gather_head.defvjp(_gather_head_forward, _gather_head_backward)


def _psum_scatter(x: jax.Array) -> jax.Array:
    """The sum of `x` [vocab, hidden] over the devices, each with its part of the hidden columns."""
    return jax.lax.psum_scatter(x, HIDDEN_AXES, scatter_dimension=1, tiled=True)


def ring_scatter(x: jax.Array) -> jax.Array:
    """`_psum_scatter` by sending sums of parts to neighbours, half of the rows in each direction.

    A part starts at the device after its owner, and every device that it passes adds its own.
    """
    devices = jax.lax.axis_size(HIDDEN_AXES)
    here, width = jax.lax.axis_index(HIDDEN_AXES), x.shape[1] // devices
    middle = x.shape[0] // 2 // _TILE * _TILE
    halves = ((x[:middle], 1), (x[middle:], -1))

    def part(rows: jax.Array, owner: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(rows, owner % devices * width, width, axis=1)

    def pass_on(step: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        return [
            part(rows, here - direction * (step + 1))
            + jax.lax.ppermute(
                total, HIDDEN_AXES, [(i, (i + direction) % devices) for i in range(devices)]
            )
            for total, (rows, direction) in zip(sums, halves, strict=True)
        ]

    first = [part(rows, here - direction) for rows, direction in halves]
    return jnp.concatenate(jax.lax.fori_loop(1, devices, pass_on, first))


def _prepend_neighbour(
    hidden: jax.Array, input_ids: jax.Array, mask: jax.Array, shards: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prepends the previous device's last hidden state to this device's tokens.

    The first token of a row has no predecessor and is masked out.
    """
    steps = [(i, i + 1) for i in range(shards - 1)]
    neighbour = jax.lax.ppermute(hidden[:, -1:], "sequence", steps)
    first = (jax.lax.axis_index("sequence") == 0) & (jnp.arange(mask.shape[1]) == 0)
    shift = lambda x: jnp.pad(x, ((0, 0), (1, 0)))
    return (
        jnp.concatenate([neighbour, hidden], axis=1),
        shift(input_ids),
        shift(mask.astype(bool) & ~first),
    )
