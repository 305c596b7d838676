"""Rotary position embeddings: the angles of positions, and rotating queries and keys by them."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from manus_jax.models.architecture import Architecture, RopeScaling


def rope_angles(
    positions: jax.Array, arch: Architecture, local: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [rows, length, head_dim / 2], of int32 `positions`.

    `local` layers have a base of their own.
    """
    angles = positions[..., None].astype(jnp.float32) * _frequencies(arch, local)
    return jnp.cos(angles), jnp.sin(angles)


def _frequencies(arch: Architecture, local: bool) -> np.ndarray:
    """Angles per position, float32 [head_dim / 2].

    They are rounded as transformers and vLLM round them: an angle of position 2,000 changes by 1e-4
    if its frequency changes by one unit in the last place. They are computed on the host, because
    compilers approximate powers.
    """
    theta = arch.local_rope_theta if local else arch.rope_theta
    exponents = np.arange(0, arch.head_dim, 2, dtype=np.float32) / np.float32(arch.head_dim)
    powers = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    inverse = np.float32(1) / powers
    if local:
        return inverse
    if arch.rope_scaling is not None:
        inverse = _llama3_frequencies(inverse, arch.rope_scaling)
    return inverse / np.float32(arch.rope_factor)


def _llama3_frequencies(inverse: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Divides low frequencies by `factor`, keeps high ones and interpolates in between."""
    wavelength = np.float32(2 * math.pi) / inverse
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0).astype(np.float32)
    return ((1 - smooth) * inverse / np.float32(s.factor) + smooth * inverse).astype(np.float32)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array], scale: float = 1.0) -> jax.Array:
    """Rotates pairs (i, i + dim/2) of `x` [rows, length, heads, dim] by the position's angle.

    The result is multiplied by `scale`.
    """
    cos, sin = (a[:, :, None, :] if scale == 1.0 else scale * a[:, :, None, :] for a in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x.dtype)
