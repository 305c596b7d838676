"""Log-probabilities and entropies of tokens, without ever building `[rows, length, vocab]`.

The LM head is the largest matrix product of a small model and its logits the largest array of any
model. So it runs only where a token is trained: the trained positions of each row are moved to
its front, and a loop of as many chunks as the fullest row needs projects them, one chunk of logits
at a time. The backward pass computes each chunk's logits again. The loop's length is data, not
shape: nothing recompiles when the share of trained tokens changes.
"""

import functools

import jax
import jax.numpy as jnp

# Positions of each row that are projected at a time. Smaller chunks waste fewer on rows with little
# to train, larger ones add up the head's gradient less often.
CHUNK = 64


def token_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    input_ids: jax.Array,
    mask: jax.Array,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int = CHUNK,
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
      chunk: how many positions of each row are projected at a time.
      token_axes: under `shard_map`, the mesh axes that the tokens are split over.
      vocab_axis: under `shard_map` (without checks of replication), the one that the head's
        vocabulary is split over; all its devices hold the same tokens.

    Returns:
      `(log_probs, entropies)`, float32 [rows, length], zero outside the mask. Without
      `with_entropy` the entropies are zeros.
    """
    rows, length = input_ids.shape
    wanted = mask.astype(bool).at[:, 0].set(False)
    chunk = min(length, chunk)
    padded = -(-length // chunk) * chunk
    order = jnp.argsort(~wanted, axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (0, padded - length)))
    counts = wanted.sum(axis=1)
    live = jnp.arange(padded)[None, :] < counts[:, None]
    targets = jnp.take_along_axis(input_ids, order, axis=1)
    sources = jnp.maximum(order - 1, 0)
    fullest = jnp.max(counts)
    num_chunks = -(-(jax.lax.pmax(fullest, token_axes) if token_axes else fullest) // chunk)
    static = (chunk, temperature, with_entropy, vocab_axis)
    log_probs, entropies = _compact_log_probs(
        hidden, head, sources, targets, live, num_chunks, *static
    )
    row = jnp.arange(rows)[:, None]
    # Dead places of `order` repeat real positions: they add nothing.
    spread = lambda x: (
        jnp.zeros((rows, length), jnp.float32).at[row, order].add(jnp.where(live, x, 0.0))
    )
    return spread(log_probs), spread(entropies) if with_entropy else jnp.zeros((rows, length))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _compact_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    live: jax.Array,
    num_chunks: jax.Array,
    chunk: int,
    temperature: float,
    with_entropy: bool,
    vocab_axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [rows, padded] of `targets`, read at `sources`, chunk by chunk."""
    static = (chunk, temperature, with_entropy, vocab_axis)
    return _forward(hidden, head, sources, targets, live, num_chunks, *static)[0]


def _chunk_logits(
    hidden: jax.Array, head: jax.Array, source: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """States at `source` [rows, chunk, hidden_size], and logits float32 [rows, chunk, vocab]."""
    states = jnp.take_along_axis(hidden, source[:, :, None], axis=1)
    logits = jnp.einsum("rcd,vd->rcv", states, head, preferred_element_type=jnp.float32)
    return states, logits / temperature if temperature != 1.0 else logits


def _window(x: jax.Array, index: jax.Array, chunk: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis=1)


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
    """Logits [rows, chunk] of `target` [rows, chunk]."""
    vocab = logits.shape[-1]
    local = _from_first(target, vocab, vocab_axis)
    place = jnp.clip(local, 0, vocab - 1)
    picked = jnp.take_along_axis(logits, place[:, :, None], axis=2)[:, :, 0]
    return _add(jnp.where(place == local, picked, 0.0), vocab_axis)


def _forward(  # type: ignore[no-untyped-def]
    hidden,
    head,
    sources,
    targets,
    live,
    num_chunks,
    chunk,
    temperature,
    with_entropy,
    vocab_axis,
):
    compute_head = head.astype(hidden.dtype)
    zeros = jnp.zeros(sources.shape, jnp.float32)

    def body(i, carry):  # type: ignore[no-untyped-def]
        log_probs, entropies, lses = carry
        _, logits = _chunk_logits(hidden, compute_head, _window(sources, i, chunk), temperature)
        lse = _logsumexp(logits, vocab_axis)
        picked = _picked(logits, _window(targets, i, chunk), vocab_axis)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        log_probs = put(log_probs, picked - lse, i * chunk)
        lses = put(lses, lse, i * chunk)
        if with_entropy:
            mean_logit = jnp.sum(jnp.exp(logits - lse[..., None]) * logits, axis=-1)
            mean_logit = _add(mean_logit, vocab_axis)
            entropies = put(entropies, lse - mean_logit, i * chunk)
        return log_probs, entropies, lses

    log_probs, entropies, lses = jax.lax.fori_loop(0, num_chunks, body, (zeros, zeros, zeros))
    residuals = (hidden, head, sources, targets, live, num_chunks, lses, entropies)
    return (log_probs, entropies), residuals


def _backward(chunk, temperature, with_entropy, vocab_axis, residuals, cotangents):  # type: ignore[no-untyped-def]
    hidden, head, sources, targets, live, num_chunks, lses, entropies = residuals
    # `shard_map` hands each device its share of a cotangent that is the same on all, and adds up
    # what they return for `hidden`, which is the same on all too.
    d_log_probs, d_entropies = (jnp.where(live, _add(g, vocab_axis), 0.0) for g in cotangents)
    compute_head = head.astype(hidden.dtype)

    def body(i, carry):  # type: ignore[no-untyped-def]
        d_states, d_head = carry
        states, logits = _chunk_logits(
            hidden, compute_head, _window(sources, i, chunk), temperature
        )
        lse = _window(lses, i, chunk)[..., None]
        g = _window(d_log_probs, i, chunk)[..., None]
        probs = jnp.exp(logits - lse)
        if with_entropy:
            # dH/dz = -p (z - E[z]), and E[z] = lse - H.
            mean_logit = lse - _window(entropies, i, chunk)[..., None]
            slope = g + _window(d_entropies, i, chunk)[..., None] * (logits - mean_logit)
            d_logits = -slope * probs
        else:
            d_logits = -g * probs
        target = _from_first(_window(targets, i, chunk), head.shape[0], vocab_axis)[..., None]
        vocab = jax.lax.broadcasted_iota(jnp.int32, d_logits.shape, 2)
        d_logits = jnp.where(vocab == target, d_logits + g, d_logits) / temperature
        d_logits = d_logits.astype(hidden.dtype)
        d_chunk = jnp.einsum("rcv,vd->rcd", d_logits, compute_head)
        d_states = jax.lax.dynamic_update_slice_in_dim(d_states, d_chunk, i * chunk, axis=1)
        d_head = d_head + jnp.einsum(
            "rcv,rcd->vd", d_logits, states, preferred_element_type=jnp.float32
        )
        return d_states, d_head

    init = (
        jnp.zeros((*sources.shape, hidden.shape[-1]), hidden.dtype),
        jnp.zeros(head.shape, jnp.float32),
    )
    d_states, d_head = jax.lax.fori_loop(0, num_chunks, body, init)
    rows = jnp.arange(hidden.shape[0])[:, None]
    d_states = jnp.where(live[..., None], d_states, 0)
    d_hidden = jnp.zeros_like(hidden).at[rows, sources].add(d_states)
    return d_hidden, d_head.astype(head.dtype), None, None, None, None


_compact_log_probs.defvjp(_forward, _backward)
