"""Rejection-sampling fine-tuning: successful episodes are imitated, the others are dropped.

With an advantage of 1 for every token that is kept, the plain policy gradient is the gradient of
the cross-entropy of the kept episodes. With episodes of the current policy, each step is one round
of sampling, keeping the successes and fine-tuning on them.

See "Scaling Relationship on Learning Mathematical Reasoning with Large Language Models", Yuan et
al. (https://arxiv.org/abs/2308.01825).
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np


def kept(successes: np.ndarray) -> np.ndarray:
    """Which episodes of a group are trained on, bool [n], by their success, bool [n]."""
    return successes


def rft(valid: chex.Array) -> jax.Array:
    """1 for every episode, [B]; 0 for rows that are not valid."""
    chex.assert_rank(valid, 1)
    return jnp.asarray(valid, jnp.float32)
