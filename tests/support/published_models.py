"""A small model, changed by hand, for the tests of published weights."""

import functools

import jax
import numpy as np

from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, init_params

ARCH = Architecture("qwen2", 64, 32, 64, 2, 8, 8, 8, qkv_bias=True, tie_embeddings=False)
CARD = huggingface.new_card(ARCH, None, "bfloat16")


@functools.cache
def _model(seed):
    return init_params(Transformer, ARCH, Compute(), seed)


def model(seed=0):
    """A tree of its own, whose arrays are made once."""
    return jax.tree.map(lambda x: x, _model(seed))


def changed(params, share, seed):
    """A copy in which about that share of the weights, spread evenly, is another number."""
    rng = np.random.default_rng(seed)
    moved = lambda x: np.asarray(x) + np.float32(1) * (rng.random(x.shape) < share)
    return jax.tree.map(lambda x: jax.device_put(moved(x)), params)


def exported(params, directory):
    """The tensors as `convert to-hf` writes them, by name, in bytes."""
    huggingface.save_hf(params, CARD, directory)
    return tensors_of(directory / "model.safetensors")


def tensors_of(path):
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def copies(mirror):
    return {name: mirror.store.raw(name).tobytes() for name in mirror.store.specs}
