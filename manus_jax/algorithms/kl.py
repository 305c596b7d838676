"""KL divergence from a reference policy: estimators, the reward penalty and its controllers.

Estimators are elementwise functions of the log-probs of sampled tokens, arrays of any shape, with
d = log pi - log pi_ref. k1 and k3 are unbiased estimates of the divergence, but only the gradient
of k2 equals, in expectation, the gradient of the divergence; `k3_value_k2_gradient` combines the
value of k3 with the gradient of k2.

See "Approximating KL Divergence", Schulman (http://joschu.net/blog/kl-approx.html).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp

from manus_jax.registry import Registry

Estimator = Callable[[chex.Array, chex.Array], jax.Array]


ESTIMATORS: Registry[Estimator] = Registry("KL estimator")


def _difference(log_probs: chex.Array, ref_log_probs: chex.Array) -> jax.Array:
    chex.assert_equal_shape([log_probs, ref_log_probs])
    chex.assert_type([log_probs, ref_log_probs], float)
    return jnp.asarray(log_probs) - ref_log_probs


@ESTIMATORS.register("kl")
@ESTIMATORS.register("k1")
def k1(log_probs: chex.Array, ref_log_probs: chex.Array) -> jax.Array:
    """d."""
    return _difference(log_probs, ref_log_probs)


@ESTIMATORS.register("abs")
def absolute(log_probs: chex.Array, ref_log_probs: chex.Array) -> jax.Array:
    """|d|."""
    return jnp.abs(_difference(log_probs, ref_log_probs))


@ESTIMATORS.register("mse")
@ESTIMATORS.register("k2")
def k2(log_probs: chex.Array, ref_log_probs: chex.Array) -> jax.Array:
    """d² / 2."""
    return 0.5 * _difference(log_probs, ref_log_probs) ** 2


@ESTIMATORS.register("low_var_kl")
@ESTIMATORS.register("k3")
def k3(log_probs: chex.Array, ref_log_probs: chex.Array) -> jax.Array:
    """exp(-d) - 1 + d, with d clamped to ±20 and the result to ±10."""
    d = jnp.clip(_difference(log_probs, ref_log_probs), -20.0, 20.0)
    return jnp.clip(jnp.exp(-d) - 1.0 + d, -10.0, 10.0)


@ESTIMATORS.register("low_var_kl+")
@ESTIMATORS.register("k3+")
def k3_value_k2_gradient(log_probs: chex.Array, ref_log_probs: chex.Array) -> jax.Array:
    """The value of k3 with the gradient of k2 (straight-through)."""
    surrogate = k2(log_probs, ref_log_probs)
    value = jax.lax.stop_gradient(k3(log_probs, ref_log_probs) - surrogate)
    return value + surrogate


def kl_in_reward(
    token_rewards: chex.Array, kl_t: chex.Array, mask: chex.Array, beta: float | chex.Array
) -> jax.Array:
    """Token rewards minus beta times the KL of each agent token, all [B, T]."""
    chex.assert_rank([token_rewards, kl_t, mask], 2)
    chex.assert_equal_shape([token_rewards, kl_t, mask])
    chex.assert_type([token_rewards, kl_t], float)
    return token_rewards - jnp.where(jnp.asarray(mask, bool), beta * kl_t, 0.0)


def observed_kl(kl_t: chex.Array, mask: chex.Array) -> jax.Array:
    """The KL that a controller observes: the mean over rows of the mean over agent tokens.

    `kl_t` and `mask` are [B, T]; rows without agent tokens are ignored.
    """
    chex.assert_rank([kl_t, mask], 2)
    chex.assert_equal_shape([kl_t, mask])
    mask = jnp.asarray(mask, bool)
    tokens = mask.sum(-1)
    row_mean = jnp.sum(kl_t, axis=-1, where=mask) / jnp.maximum(tokens, 1)
    return row_mean.sum() / jnp.maximum((tokens > 0).sum(), 1)


@dataclass(frozen=True)
class FixedKL:
    """A constant coefficient."""

    coef: float

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError(f"KL coef must not be negative, got {self.coef}")

    def update(self, observed: float, n_rows: int) -> "FixedKL":
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient that is adapted to keep the observed KL at a target.

    See "Fine-Tuning Language Models from Human Preferences", Ziegler et al.
    (https://arxiv.org/abs/1909.08593).
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.coef <= 0 or self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"adaptive KL needs coef, target and horizon above 0, got {self}")

    def update(self, observed: float, n_rows: int) -> "AdaptiveKL":
        """Multiplies coef by 1 + e n_rows / horizon, with e = clip(observed / target - 1, ±0.2).

        The factor is at least 0.5: with a horizon far below the batch size it would otherwise
        become negative and turn the penalty into a reward.
        """
        error = min(max(float(observed) / self.target - 1.0, -0.2), 0.2)
        factor = max(1.0 + error * n_rows / self.horizon, 0.5)
        return dataclasses.replace(self, coef=self.coef * factor)


KLController = FixedKL | AdaptiveKL
