"""Sampling one token per row from its logits, on the device.

A draw needs one uniform number and no sorting: probabilities are summed per block of the
vocabulary, and the number selects a block and then a token in it. Top-k, top-p and min-p each keep
the tokens whose logit is within some distance of the maximum, so each is one distance per row,
found by bisection; ties at that distance are kept. Logits are [vocab, rows], the layout that the LM
head computes fastest, with every reduction over the long axis.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from manus_jax.engines.protocol import Sampling

BLOCK = 128
# At this distance from the maximum logit, a float32 probability is zero.
_FARTHEST = 104.0


class Controls(NamedTuple):
    """Sampling settings per row: arrays [rows]; `seeds` is uint32 [rows, 2]."""

    temperature: Any
    top_p: Any
    top_k: Any
    min_p: Any
    seeds: Any

    def put(self, row: int, how: Sampling, seed: int) -> None:
        """Sets a row of host arrays. `seed` may be any integer; its low 64 bits are used."""
        self.temperature[row] = how.temperature
        self.top_p[row] = how.top_p
        self.top_k[row] = how.top_k
        self.min_p[row] = how.min_p
        self.seeds[row] = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def no_controls(rows: int) -> Controls:
    """Default settings as host arrays: temperature 1, seed 0."""
    return Controls(
        temperature=np.ones(rows, np.float32),
        top_p=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        min_p=np.zeros(rows, np.float32),
        seeds=np.zeros((rows, 2), np.uint32),
    )


def sample(
    logits: jax.Array, controls: Controls, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Samples a token for each row as a pure function of the row's logits, seed and position.

    The logits are divided by the temperature. Then min-p and top-k, and finally top-p on the
    remaining tokens, drop tokens. Temperature 0 takes the most likely token (the first of equals)
    and returns its log-prob at temperature 1 without dropping.

    Args:
      logits: float32 [vocab, rows].
      controls: see `Controls`.
      positions: int32 [rows], the position of the sampled token in its stream.

    Returns:
      Tokens int32 [rows], and their log-probs under the distribution they were sampled from.
    """
    greedy = controls.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, controls.temperature)
    missing = -scaled.shape[0] % BLOCK
    if missing:
        scaled = jnp.pad(scaled, ((0, missing), (0, 0)), constant_values=-jnp.inf)
    blocks = scaled.reshape(-1, BLOCK, scaled.shape[1])
    distances = blocks.max(axis=(0, 1)) - blocks
    cuts = jnp.where(greedy, 0.0, _cuts(distances, controls))
    masses = _mass(distances, cuts)
    total = masses.sum(axis=0)
    # A greedy draw uses the number 0 and keeps only the most likely tokens.
    target = jnp.where(greedy, 0.0, _uniform(controls.seeds, positions)) * total

    block, before = _first_above(masses, target)
    inside = jnp.take_along_axis(distances, block[None, None, :], axis=0)[0]
    weights = jnp.where(inside <= cuts, jnp.exp(-inside), 0.0)
    token, _ = _first_above(weights, target - before)
    everything = jax.lax.cond(
        jnp.any(greedy), lambda: _mass(distances, jnp.inf).sum(axis=0), lambda: total
    )
    distance = jnp.take_along_axis(inside, token[None, :], axis=0)[0]
    log_probs = -distance - jnp.log(jnp.where(greedy, everything, total))
    return block * BLOCK + token, log_probs


def _uniform(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    return jax.vmap(lambda key, at: jax.random.uniform(jax.random.fold_in(key, at)))(
        keys, positions
    )


def _first_above(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first index at which the cumulative sum of `weights` [n, rows] exceeds `target` [rows],
    and the sum before it. Rounding of the target never selects an index of weight 0."""
    sums = jnp.cumsum(weights, axis=0)
    index = jnp.sum(sums <= target, axis=0)
    counts = jnp.arange(weights.shape[0], dtype=jnp.int32)[:, None]
    last = jnp.max(jnp.where(weights > 0, counts, 0), axis=0)
    index = jnp.minimum(index, last).astype(jnp.int32)
    before = jnp.take_along_axis(sums - weights, index[None, :], axis=0)[0]
    return index, before


def _mass(distances: jax.Array, cuts: jax.Array | float) -> jax.Array:
    """Unnormalised probability within the cut-off, per block: [blocks, rows]."""
    return jnp.where(distances <= cuts, jnp.exp(-distances), 0.0).sum(axis=1)


def _cuts(distances: jax.Array, controls: Controls) -> jax.Array:
    """The largest distance from the maximum logit at which a token is kept: [rows]."""
    cuts = jnp.where(controls.min_p > 0, -jnp.log(controls.min_p), jnp.inf)
    limited = controls.top_k > 0
    counted = lambda: _bisect(
        lambda cut: jnp.where(distances <= cut, 1.0, 0.0).sum(axis=1).sum(axis=0) >= controls.top_k,
        cuts.shape,
    )
    by_count = jax.lax.cond(jnp.any(limited), counted, lambda: jnp.full_like(cuts, jnp.inf))
    cuts = jnp.minimum(cuts, jnp.where(limited, by_count, jnp.inf))
    nucleus = controls.top_p < 1

    def weighed() -> jax.Array:
        needed = controls.top_p * _mass(distances, cuts).sum(axis=0)
        return _bisect(lambda cut: _mass(distances, cut).sum(axis=0) >= needed, cuts.shape)

    by_mass = jax.lax.cond(jnp.any(nucleus), weighed, lambda: jnp.full_like(cuts, jnp.inf))
    return jnp.minimum(cuts, jnp.where(nucleus, by_mass, jnp.inf))


def _bisect(enough: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The smallest float32 in 0..104 for which the monotone predicate `enough` holds; else 104.

    Non-negative floats are ordered like their bits, so bisecting the bits finds the exact float.
    """
    as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)
    most = jax.lax.bitcast_convert_type(jnp.float32(_FARTHEST), jnp.int32)

    def halve(_: int, interval: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = interval
        middle = low + (high - low) // 2
        holds = enough(as_float(middle))
        return jnp.where(holds, low, middle + 1), jnp.where(holds, middle, high)

    interval = jnp.zeros(shape, jnp.int32), jnp.full(shape, most)
    return as_float(jax.lax.fori_loop(0, 31, halve, interval)[1])
