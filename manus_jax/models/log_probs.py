"""Log-probabilities and entropies of tokens, without materialising `[rows, length, vocab]`.

The LM head is the largest matrix product of a small model, and its logits are the largest array of
any model, so it is applied only to trained tokens: the trained positions of all rows are compacted
to the front, and a loop computes their logits chunk by chunk. The backward pass recomputes each
chunk's logits. The number of chunks is data, not shape, so nothing is recompiled when the fraction
of trained tokens changes.
"""

import functools

import jax
import jax.numpy as jnp


def chunk_size(tokens: int) -> int:
    """The number of positions per chunk if a device has `tokens` tokens of a micro-batch.

    Small chunks waste little computation in the last chunk; large chunks read the head and
    accumulate its gradient less often. The result is about an eighth of `tokens`, a multiple of 32
    up to 512.
    """
    return min(tokens, 512, max(32, tokens // 256 * 32))


def token_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    input_ids: jax.Array,
    mask: jax.Array,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int | None = None,
    token_axes: tuple[str, ...] = (),
    vocab_axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each masked token given the preceding tokens of its row.

    Args:
      hidden: [rows, length, hidden_size] states; token t is predicted from position t - 1.
      head: [vocab, hidden_size].
      input_ids: int32 [rows, length].
      mask: bool [rows, length], the tokens to score. Position 0 is never scored.
      temperature: divides the logits.
      with_entropy: also compute the entropy of each masked token's distribution.
      chunk: positions per chunk; by default `chunk_size`.
      token_axes: under `shard_map`, the mesh axes that tokens are sharded over.
      vocab_axis: under `shard_map` (without replication checks), the mesh axis that the head's
        vocabulary is sharded over; its devices all have the same tokens.

    Returns:
      `(log_probs, entropies)`, float32 [rows, length], zero outside the mask. Without
      `with_entropy` the entropies are zeros.
    """
    wanted = mask.astype(bool).at[:, 0].set(False).reshape(-1)
    chunk = min(wanted.size, chunk or chunk_size(wanted.size))
    count = wanted.sum()
    most = jax.lax.pmax(count, token_axes) if token_axes else count
    static = (chunk, temperature, with_entropy, vocab_axis)
    states = hidden.reshape(wanted.size, -1)
    log_probs, entropies = _flat_log_probs(
        states, head, input_ids.reshape(-1), wanted, -(-most // chunk), *static
    )
    return log_probs.reshape(mask.shape), entropies.reshape(mask.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _flat_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    wanted: jax.Array,
    num_chunks: jax.Array,
    chunk: int,
    temperature: float,
    with_entropy: bool,
    vocab_axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [tokens] of wanted `targets`, from the preceding states."""
    static = (chunk, temperature, with_entropy, vocab_axis)
    return _forward(hidden, head, targets, wanted, num_chunks, *static)[0]


def _compaction(wanted: jax.Array, chunk: int) -> jax.Array:
    """Token indices with the wanted tokens first, padded to a multiple of `chunk`."""
    order = jnp.argsort(~wanted, stable=True)
    return jnp.pad(order, (0, -wanted.size % chunk))


def _scatter_back(compact: jax.Array, wanted: jax.Array) -> jax.Array:
    """The inverse of `_compaction`: [slots, …] to [tokens, …], 0 for tokens not wanted."""
    place = jnp.maximum(jnp.cumsum(wanted) - 1, 0)
    return jnp.where(wanted.reshape(-1, *[1] * (compact.ndim - 1)), compact[place], 0)


def _chunk_logits(
    hidden: jax.Array, head: jax.Array, tokens: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """States [chunk, hidden_size] before `tokens`, and logits float32 [chunk, vocab]."""
    states = hidden[jnp.maximum(tokens - 1, 0)]
    logits = jnp.einsum("cd,vd->cv", states, head, preferred_element_type=jnp.float32)
    return states, logits / temperature if temperature != 1.0 else logits


def _window(x: jax.Array, index: jax.Array, chunk: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk)


def _add(x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else jax.lax.psum(x, axis)


def _logsumexp(logits: jax.Array, vocab_axis: str | None) -> jax.Array:
    local = jax.nn.logsumexp(logits, axis=-1)
    if vocab_axis is None:
        return local
    most = jax.lax.pmax(local, vocab_axis)
    return most + jnp.log(jax.lax.psum(jnp.exp(local - most), vocab_axis))


def _shard_ids(targets: jax.Array, vocab: int, vocab_axis: str | None) -> jax.Array:
    """Targets relative to the first of the `vocab` ids in this device's shard."""
    return targets if vocab_axis is None else targets - jax.lax.axis_index(vocab_axis) * vocab


def _picked(logits: jax.Array, target: jax.Array, vocab_axis: str | None) -> jax.Array:
    """Logits [chunk] of `target` [chunk]."""
    vocab = logits.shape[-1]
    local = _shard_ids(target, vocab, vocab_axis)
    place = jnp.clip(local, 0, vocab - 1)
    picked = jnp.take_along_axis(logits, place[:, None], axis=1)[:, 0]
    return _add(jnp.where(place == local, picked, 0.0), vocab_axis)


def _forward(  # type: ignore[no-untyped-def]
    hidden, head, targets, wanted, num_chunks, chunk, temperature, with_entropy, vocab_axis
):
    compute_head = head.astype(hidden.dtype)
    order = _compaction(wanted, chunk)
    zeros = jnp.zeros(order.shape, jnp.float32)

    def body(i, carry):  # type: ignore[no-untyped-def]
        log_probs, entropies, lses = carry
        tokens = _window(order, i, chunk)
        _, logits = _chunk_logits(hidden, compute_head, tokens, temperature)
        lse = _logsumexp(logits, vocab_axis)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        log_probs = put(log_probs, _picked(logits, targets[tokens], vocab_axis) - lse, i * chunk)
        lses = put(lses, lse, i * chunk)
        if with_entropy:
            mean_logit = jnp.sum(jnp.exp(logits - lse[:, None]) * logits, axis=-1)
            mean_logit = _add(mean_logit, vocab_axis)
            entropies = put(entropies, lse - mean_logit, i * chunk)
        return log_probs, entropies, lses

    log_probs, entropies, lses = jax.lax.fori_loop(0, num_chunks, body, (zeros, zeros, zeros))
    residuals = (hidden, head, targets, wanted, num_chunks, lses, entropies)
    return (_scatter_back(log_probs, wanted), _scatter_back(entropies, wanted)), residuals


def _backward(chunk, temperature, with_entropy, vocab_axis, residuals, cotangents):  # type: ignore[no-untyped-def]
    hidden, head, targets, wanted, num_chunks, lses, entropies = residuals
    compute_head = head.astype(hidden.dtype)
    order = _compaction(wanted, chunk)
    live = jnp.arange(order.size) < wanted.sum()
    # For arrays replicated over `vocab_axis`, `shard_map` passes each device a part of the
    # cotangent and sums the gradients that the devices return.
    d_log_probs, d_entropies = (
        jnp.where(live, _add(g, vocab_axis)[order], 0.0) for g in cotangents
    )

    def body(i, carry):  # type: ignore[no-untyped-def]
        d_states, d_head = carry
        tokens = _window(order, i, chunk)
        states, logits = _chunk_logits(hidden, compute_head, tokens, temperature)
        lse = _window(lses, i, chunk)[:, None]
        g = _window(d_log_probs, i, chunk)[:, None]
        probs = jnp.exp(logits - lse)
        if with_entropy:
            # dH/dz = -p (z - E[z]), and E[z] = lse - H.
            mean_logit = lse - _window(entropies, i, chunk)[:, None]
            slope = g + _window(d_entropies, i, chunk)[:, None] * (logits - mean_logit)
            d_logits = -slope * probs
        else:
            d_logits = -g * probs
        target = _shard_ids(targets[tokens], head.shape[0], vocab_axis)[:, None]
        vocab = jax.lax.broadcasted_iota(jnp.int32, d_logits.shape, 1)
        d_logits = jnp.where(vocab == target, d_logits + g, d_logits) / temperature
        d_logits = jax.lax.optimization_barrier(d_logits.astype(hidden.dtype))
        d_chunk = jnp.einsum("cv,vd->cd", d_logits, compute_head)
        d_states = jax.lax.dynamic_update_slice_in_dim(d_states, d_chunk, i * chunk, axis=0)
        d_head = d_head + jnp.einsum(
            "cv,cd->vd", d_logits, states, preferred_element_type=jnp.float32
        )
        return d_states, d_head

    init = (
        jnp.zeros((order.size, hidden.shape[-1]), hidden.dtype),
        jnp.zeros(head.shape, jnp.float32),
    )
    d_states, d_head = jax.lax.fori_loop(0, num_chunks, body, init)
    # The gradient of a token belongs to the preceding state; first tokens of rows are not wanted.
    d_hidden = jnp.pad(_scatter_back(d_states, wanted)[1:], ((0, 1), (0, 0)))
    return d_hidden, d_head.astype(head.dtype), None, None, None


_flat_log_probs.defvjp(_forward, _backward)
