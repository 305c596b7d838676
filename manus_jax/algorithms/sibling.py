"""Advantages relative to siblings, for episodes that branch.

The episodes of a group form trees: a branch shares the turns of its parent before `branch_turn` and
continues on its own from there. Where episodes part, the continuations are siblings: samples of
what the policy does from one state. Comparing their values estimates the advantage of each without
a critic, as GRPO does at the start of an episode.

A turn belongs to the stretch since the last turn at which its episode parted from another. The
value of a stretch is the mean of the values of the stretches that follow it, down to the scores of
the episodes. Every stretch is trained once, in the episode that played it first.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from manus_jax.algorithms import advantages


class Tree(NamedTuple):
    """How the B episodes of a batch branch; turns are padded to K."""

    parents: chex.Array  # int [B] in [0, B): the parent's row; its own for an episode without one
    branch_turns: chex.Array  # int [B]: the first turn of its own; 0 without a parent
    roots: chex.Array  # bool [B]: without a parent
    taken: chex.Array  # bool [B, K]: the turns that the episode played itself
    turn_ids: chex.Array  # int [B, T] in [0, K), the turn each token belongs to


def sibling(
    scores: chex.Array,
    group_ids: chex.Array,
    valid: chex.Array,
    tree: Tree,
    normalize_by_std: bool = False,
    eps: float = 1e-6,
) -> jax.Array:
    """Each turn's advantage [B, K]: that of its stretch relative to its siblings; 0 at padding.

    Episodes without a parent are siblings at their start if they belong to the same group, so
    without branches this is GRPO. A stretch without siblings gets 0. `scores`, `group_ids` and
    `valid` are [B]; rows that are not valid are excluded and get 0.
    """
    chex.assert_rank([scores, group_ids, valid, tree.taken], [1, 1, 1, 2])
    chex.assert_equal_shape([scores, group_ids, valid, tree.parents, tree.branch_turns, tree.roots])
    valid, roots = jnp.asarray(valid, bool), jnp.asarray(tree.roots, bool)
    rows = jnp.arange(scores.shape[0])
    turns = jnp.arange(tree.taken.shape[1])

    def compared(
        values: jax.Array, ids: jax.Array, present: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        stats = advantages.group_statistics(values, ids, present)
        relative = advantages.grpo(values, ids, present, normalize_by_std, eps)
        return present & (stats.size > 1), relative, stats.mean

    def before(values: jax.Array, turn: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """From the values of the stretches at `turn` to those of the stretches before it."""
        joins = ~roots & (tree.branch_turns == turn)
        present = valid & (roots | (tree.branch_turns <= turn))
        parted, relative, mean = compared(values, jnp.where(joins, tree.parents, rows), present)
        return jnp.where(parted & ~joins, mean, values), (parted, relative)

    values, (parted, relative) = jax.lax.scan(
        before, jnp.asarray(scores, jnp.float32), turns, reverse=True
    )
    at_start, first, _ = compared(values, jnp.asarray(group_ids), valid & roots)

    def after(adv: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        adv = jnp.where(inputs[0], inputs[1], adv)
        return adv, adv

    _, adv_KB = jax.lax.scan(after, jnp.where(at_start, first, 0.0), (parted, relative))
    return jnp.where(jnp.asarray(tree.taken, bool) & valid[:, None], adv_KB.T, 0.0)
