"""Log-probabilities and entropies of tokens, without ever building `[rows, length, vocab]`.

The LM head is the largest matrix product of a small model and its logits the largest array of any
model. So it runs only where a token is trained: the trained positions of all rows are gathered in
front, and a loop of as many chunks as they fill projects them, one chunk of logits at a time. The
backward pass computes each chunk's logits again. The loop's length is data, not shape: nothing
recompiles when the share of trained tokens changes.
"""

import functools

import jax
import jax.numpy as jnp


def chunk_size(tokens: int) -> int:
    """How many positions are projected at a time, where a device holds `tokens` of a micro-batch.

    Small chunks waste little on the last one, large ones seldom read the head and add up its
    gradient: an eighth of the tokens, in steps of 32 and up to 512.
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
    """Log-prob of each masked token given what comes before it in its row.

    Args:
      hidden: [rows, length, hidden_size] states; token t is predicted from position t - 1.
      head: [vocab, hidden_size].
      input_ids: int32 [rows, length].
      mask: bool [rows, length], the tokens wanted. Position 0 is never predicted.
      temperature: the logits are divided by it.
      with_entropy: also compute the entropy of each masked token's distribution.
      chunk: how many positions are projected at a time; `chunk_size` unless given.
      token_axes: under `shard_map`, the mesh axes that the tokens are split over.
      vocab_axis: under `shard_map` (without checks of replication), the one that the head's
        vocabulary is split over; all its devices hold the same tokens.

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
    """Log-probs and entropies [tokens] of wanted `targets`, each read at the state before it."""
    static = (chunk, temperature, with_entropy, vocab_axis)
    return _forward(hidden, head, targets, wanted, num_chunks, *static)[0]


def _in_front(wanted: jax.Array, chunk: int) -> jax.Array:
    """Which tokens are projected in which place: wanted ones first, up to whole chunks."""
    order = jnp.argsort(~wanted, stable=True)
    return jnp.pad(order, (0, -wanted.size % chunk))


def _back(compact: jax.Array, wanted: jax.Array) -> jax.Array:
    """Undoes `_in_front`: [places, …] to [tokens, …], zero where a token is not wanted."""
    place = jnp.maximum(jnp.cumsum(wanted) - 1, 0)
    return jnp.where(wanted.reshape(-1, *[1] * (compact.ndim - 1)), compact[place], 0)


def _chunk_logits(
    hidden: jax.Array, head: jax.Array, tokens: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """States before `tokens` [chunk, hidden_size], and logits float32 [chunk, vocab]."""
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


def _from_first(targets: jax.Array, vocab: int, vocab_axis: str | None) -> jax.Array:
    """Targets counted from the first of the `vocab` ids whose logits this device computes."""
    return targets if vocab_axis is None else targets - jax.lax.axis_index(vocab_axis) * vocab


def _picked(logits: jax.Array, target: jax.Array, vocab_axis: str | None) -> jax.Array:
    """Logits [chunk] of `target` [chunk]."""
    vocab = logits.shape[-1]
    local = _from_first(target, vocab, vocab_axis)
    place = jnp.clip(local, 0, vocab - 1)
    picked = jnp.take_along_axis(logits, place[:, None], axis=1)[:, 0]
    return _add(jnp.where(place == local, picked, 0.0), vocab_axis)


def _forward(  # type: ignore[no-untyped-def]
    hidden, head, targets, wanted, num_chunks, chunk, temperature, with_entropy, vocab_axis
):
    compute_head = head.astype(hidden.dtype)
    order = _in_front(wanted, chunk)
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
    return (_back(log_probs, wanted), _back(entropies, wanted)), residuals


def _backward(chunk, temperature, with_entropy, vocab_axis, residuals, cotangents):  # type: ignore[no-untyped-def]
    hidden, head, targets, wanted, num_chunks, lses, entropies = residuals
    compute_head = head.astype(hidden.dtype)
    order = _in_front(wanted, chunk)
    live = jnp.arange(order.size) < wanted.sum()
    # `shard_map` hands each device its share of a cotangent that is the same on all, and adds up
    # what they return for `hidden`, which is the same on all too.
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
        target = _from_first(targets[tokens], head.shape[0], vocab_axis)[:, None]
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
    # A token's gradient belongs to the state before it; no row's first token is wanted.
    d_hidden = jnp.pad(_back(d_states, wanted)[1:], ((0, 1), (0, 0)))
    return d_hidden, d_head.astype(head.dtype), None, None, None


_flat_log_probs.defvjp(_forward, _backward)
