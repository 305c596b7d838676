"""Gemma 3 and Qwen3-MoE on the real vLLM, on CPU.

Its log-probs are the learner's, before and after an update of the weights.
"""

import os

import jax
import numpy as np
import pytest

from manus_jax.config.server_settings import VllmSettings
from manus_jax.data.chat import train_tokenizer
from manus_jax.engines.protocol import Request, Sampling
from manus_jax.learner.objectives import log_probs_of
from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture
from manus_jax.models.families import FAMILIES
from manus_jax.models.transformer import Compute, Transformer, abstract_model, init_params
from manus_jax.vllm.open_pool import open_vllm

PYTHON = os.environ.get("MANUS_JAX_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON, reason="MANUS_JAX_VLLM_PYTHON does not name an interpreter that has vLLM"
    ),
]
LENGTH = 256
OWN = {
    "gemma3_text": {
        "sliding_window": 48,
        "local_layers": (True, False, True),
        "query_scale": 24**-0.5,
        "embed_scale": 128**0.5,
    },
    "qwen3_moe": {"num_experts": 8, "experts_per_token": 2, "tie_embeddings": False},
}


def architecture(family):
    sizes = (family, 320, 128, 64, 3, 4, 2, 32)
    return Architecture(
        *sizes,
        initializer_range=0.1,
        max_positions=512,
        **FAMILIES[family].switches,
        **OWN[family],
    )


def expected_log_probs(arch, params, prompt, made):
    stream, end = np.zeros((1, LENGTH), np.int32), len(prompt) + len(made.token_ids)
    stream[0, :end] = [*prompt, *made.token_ids]
    live = np.arange(LENGTH)[None] < end
    batch = {
        "input_ids": stream,
        "segment_ids": live.astype(np.int32),
        "positions": np.arange(LENGTH, dtype=np.int32)[None],
        "loss_mask": live,
    }
    graphdef, _ = abstract_model(Transformer, arch, Compute())
    log_probs = jax.jit(lambda p, b: log_probs_of(graphdef, p, b)[0])(params, batch)
    return log_probs[0, len(prompt) : end]


@pytest.mark.parametrize("family", OWN)
def test_log_probs_of_vllm_are_those_of_the_learner(family, tmp_path):
    arch = architecture(family)
    (tmp_path / "tokenizer").mkdir()
    train_tokenizer(["the quick brown fox"] * 3, 300, tmp_path / "tokenizer")
    card = huggingface.new_card(arch, tmp_path / "tokenizer")
    versions = [init_params(Transformer, arch, Compute(), seed) for seed in range(2)]
    settings = VllmSettings(servers=1, python=PYTHON, weights_dir=str(tmp_path / "weights"))
    pool = open_vllm(card, versions[0], settings, slots=8, dtype="float32", max_length=LENGTH)
    prompt = tuple(5 + 7 * n % 250 for n in range(150))
    try:
        for number, params in enumerate(versions):
            if number:
                pool.update_weights(params, number)
            made = pool.submit(Request(prompt, Sampling(max_tokens=32), 1, "s")).result(300)
            assert made.versions == (number,) * 32
            expected = expected_log_probs(arch, params, prompt, made)
            np.testing.assert_allclose(made.log_probs, expected, atol=1e-4, rtol=0)
    finally:
        pool.close()
