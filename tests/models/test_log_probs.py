"""Chunked, compacted log-probs against the naive ones that build all logits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manus_jax.models.log_probs import token_log_probs


def naive(hidden, head, ids, mask, temperature):
    logits = jnp.einsum("btd,vd->btv", hidden, head) / temperature
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    picked = jnp.take_along_axis(log_p[:, :-1], ids[:, 1:, None], axis=2)[..., 0]
    shift = lambda x: jnp.pad(x, ((0, 0), (1, 0)))
    mask = mask.at[:, 0].set(False)
    return jnp.where(mask, shift(picked), 0), jnp.where(mask, shift(entropy[:, :-1]), 0)


def data(seed=0, rows=3, length=19, dim=8, vocab=41, share=0.4):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(rows, length, dim)), jnp.float32),
        jnp.asarray(0.3 * rng.normal(size=(vocab, dim)), jnp.float32),
        jnp.asarray(rng.integers(0, vocab, (rows, length)), jnp.int32),
        jnp.asarray(rng.random((rows, length)) < share),
        jnp.asarray(rng.normal(size=(2, rows, length)), jnp.float32),
    )


@pytest.mark.slow
@pytest.mark.bug("B16")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 4096])
def test_values_and_gradients_equal_the_naive_ones(temperature, with_entropy, chunk):
    hidden, head, ids, mask, weight = data()

    def ours(hidden, head):
        lp, h = token_log_probs(hidden, head, ids, mask, temperature, with_entropy, chunk)
        return jnp.sum(lp * weight[0]) + jnp.sum(h * weight[1]), (lp, h)

    def reference(hidden, head):
        lp, h = naive(hidden, head, ids, mask, temperature)
        h = h if with_entropy else jnp.zeros_like(h)
        return jnp.sum(lp * weight[0]) + jnp.sum(h * weight[1]), (lp, h)

    grad = lambda f: jax.value_and_grad(f, argnums=(0, 1), has_aux=True)
    (_, ours_out), ours_grad = jax.jit(grad(ours))(hidden, head)
    (_, ref_out), ref_grad = grad(reference)(hidden, head)
    chex.assert_trees_all_close(ours_out, ref_out, atol=1e-5)
    chex.assert_trees_all_close(ours_grad, ref_grad, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_trained_token_and_all_trained_tokens(share):
    hidden, head, ids, mask, _ = data(share=share)
    lp, _ = token_log_probs(hidden, head, ids, mask, chunk=4)
    chex.assert_trees_all_close(lp, naive(hidden, head, ids, mask, 1.0)[0], atol=1e-5)


def test_changing_the_share_of_trained_tokens_does_not_recompile():
    f = jax.jit(token_log_probs)
    for seed, share in enumerate((0.1, 0.5, 0.9)):
        hidden, head, ids, mask, _ = data(seed, share=share)
        f(hidden, head, ids, mask)
    assert f._cache_size() == 1


def test_no_array_of_all_logits_is_ever_made():
    rows, length, dim, vocab = 4, 256, 8, 512
    hidden, head, ids, mask, _ = data(rows=rows, length=length, dim=dim, vocab=vocab)
    f = lambda h, w: token_log_probs(h, w, ids, mask, 1.0, True, chunk=16)[0].sum()
    temp = jax.jit(jax.grad(f, (0, 1))).lower(hidden, head).compile().memory_analysis()
    assert temp.temp_size_in_bytes < rows * length * vocab * 4 / 2
