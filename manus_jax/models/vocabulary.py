"""The two ends of the model that touch the vocabulary, embedding and LM head, on a mesh.

Their matrices are the largest parameters, [vocab, hidden], with the vocabulary split over "tensor"
and hidden over "fsdp" and "sequence". Left to XLA's partitioner, both are gathered in the master
type, and the head's gradient is added up over all devices once per chunk of positions. Here, under
`shard_map`, tokens travel rather than the embedding; the head is gathered once per micro-batch, in
the compute type, and its gradient goes back once, in float32, to where the parameter lies.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from manus_jax.models.attention import BATCH_AXES
from manus_jax.models.log_probs import token_log_probs

HIDDEN_AXES = ("fsdp", "sequence")
MATRIX = PartitionSpec("tensor", HIDDEN_AXES)
TOKENS = PartitionSpec(BATCH_AXES, "sequence")


def embed_tokens(
    embed: jax.Array, input_ids: jax.Array, dtype: jnp.dtype, mesh: Mesh | None
) -> jax.Array:
    """Rows of `embed` [vocab, hidden] for int32 [rows, length]: `dtype` [rows, length, hidden]."""
    if mesh is None or mesh.size == 1:
        return jnp.take(embed, input_ids, axis=0).astype(dtype)

    def run(embed: jax.Array, input_ids: jax.Array) -> jax.Array:
        # A device looks up its part of the hidden dimension for the tokens of all that share the
        # matrix with it, and each gets its own tokens' parts back.
        everyones = jax.lax.all_gather(input_ids.reshape(-1), HIDDEN_AXES)
        local, held = _local_ids(everyones, embed.shape[0])
        parts = jnp.where(held[..., None], jnp.take(embed, local, axis=0).astype(dtype), 0)
        if mesh.shape["tensor"] > 1:
            parts = jax.lax.psum(parts, "tensor")
        whole = jax.lax.all_to_all(parts, HIDDEN_AXES, split_axis=0, concat_axis=2, tiled=True)
        return whole.reshape(*input_ids.shape, -1)

    return jax.shard_map(
        run, mesh=mesh, in_specs=(MATRIX, TOKENS), out_specs=TOKENS, check_vma=False
    )(embed, input_ids)


def _local_ids(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Token ids as places in the device's part of the vocabulary, and whether they lie in it."""
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
    """`token_log_probs` of arrays [rows, length, …] that are split over `mesh` as batches are."""
    if mesh is None or mesh.size == 1:
        return token_log_probs(hidden, head, input_ids, mask, temperature, with_entropy)
    log_probs_of = functools.partial(
        token_log_probs,
        temperature=temperature,
        with_entropy=with_entropy,
        token_axes=(*BATCH_AXES, "sequence"),
        vocab_axis="tensor" if mesh.shape["tensor"] > 1 else None,
    )

    def run(
        hidden: jax.Array, head: jax.Array, input_ids: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        whole = _gather_head(head, str(hidden.dtype))
        if mesh.shape["sequence"] == 1:
            return log_probs_of(hidden, whole, input_ids, mask)
        longer = _after_the_neighbour(hidden, input_ids, mask, mesh.shape["sequence"])
        log_probs, entropies = log_probs_of(longer[0], whole, *longer[1:])
        return log_probs[:, 1:], entropies[:, 1:]

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(TOKENS, MATRIX, TOKENS, TOKENS),
        out_specs=(TOKENS, TOKENS),
        check_vma=False,
    )(hidden, head, input_ids, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_head(head: jax.Array, dtype: str) -> jax.Array:
    """The head [vocab, hidden] from its parts [vocab, hidden / parts], rounded to `dtype`.

    It keeps the master type, so that its gradient does; XLA drops the cast there and back.
    """
    part = head.astype(dtype)
    return jax.lax.all_gather(part, HIDDEN_AXES, axis=1, tiled=True).astype(head.dtype)


def _gather_head_forward(head: jax.Array, dtype: str) -> tuple[jax.Array, None]:
    return _gather_head(head, dtype), None


def _gather_head_backward(dtype: str, _: None, d_whole: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(d_whole, HIDDEN_AXES, scatter_dimension=1, tiled=True),)


_gather_head.defvjp(_gather_head_forward, _gather_head_backward)


def _after_the_neighbour(
    hidden: jax.Array, input_ids: jax.Array, mask: jax.Array, shards: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The device's tokens with the last state of the device before it put in front of them.

    A row's first token has nothing before it and is not wanted.
    """
    steps = [(i, i + 1) for i in range(shards - 1)]
    neighbour = jax.lax.ppermute(hidden[:, -1:], "sequence", steps)
    first = (jax.lax.axis_index("sequence") == 0) & (jnp.arange(mask.shape[1]) == 0)
    in_front = lambda x: jnp.pad(x, ((0, 0), (1, 0)))
    return (
        jnp.concatenate([neighbour, hidden], axis=1),
        in_front(input_ids),
        in_front(mask.astype(bool) & ~first),
    )
