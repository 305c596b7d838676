"""Logits against transformers (torch, float32) on random models of each family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from manus_jax.files import CHECKSUMS
from manus_jax.models import huggingface
from manus_jax.models.transformer import Compute, Transformer, abstract_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def with_torch():
    """Imported by the first test and not by every worker that collects this file."""
    global torch
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")


SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "qwen2-tied": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"num_key_value_heads": 6, "tie_word_embeddings": False}),
    "qwen3-tied": (
        "Qwen3",
        {"num_key_value_heads": 3, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen3-untied": (
        "Qwen3",
        {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    ),
    "llama-tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama3-rope-untied": (
        "Llama",
        {"num_key_value_heads": 3, "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    ),
}


def random_hf_model(family, settings, directory, seed=0, **save):
    """A random torch model, biases and norms included, saved as a Hugging Face directory."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(0.3 * torch.randn_like(p))
    model.save_pretrained(directory, **save)
    return model


def our_logits(directory, ids, segment_ids=None, positions=None):
    params, card = huggingface.load_params(directory)
    graphdef, _ = abstract_model(Transformer, card.architecture, Compute())
    if segment_ids is None:
        segment_ids = np.ones_like(ids)
        positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    forward = jax.jit(lambda p, *args: nnx.merge(graphdef, p)(*args))
    return np.asarray(forward(params, ids, segment_ids, positions))


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case, tmp_path):
    model = random_hf_model(*CASES[case], tmp_path)
    ids = np.random.default_rng(1).integers(0, 97, (2, 150)).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(our_logits(tmp_path, ids), expected, atol=1e-4, rtol=0)


def test_packed_rows_give_each_sequence_the_logits_it_has_alone(tmp_path):
    model = random_hf_model(*CASES["qwen3-tied"], tmp_path)
    rng = np.random.default_rng(2)
    pieces = [rng.integers(0, 97, n).astype(np.int32) for n in (37, 5, 80)]
    ids = np.concatenate([*pieces, np.zeros(6, np.int32)])[None]
    segments = np.repeat([1, 2, 3, 0], [37, 5, 80, 6]).astype(np.int32)[None]
    positions = np.concatenate([np.arange(n) for n in (37, 5, 80, 6)]).astype(np.int32)[None]
    logits = our_logits(tmp_path, ids, segments, positions)[0]
    start = 0
    for piece in pieces:
        with torch.no_grad():
            alone = model(torch.tensor(piece[None], dtype=torch.long)).logits[0].numpy()
        np.testing.assert_allclose(logits[start : start + len(piece)], alone, atol=1e-4, rtol=0)
        start += len(piece)


def test_sharded_files_and_bfloat16_load_and_come_back_bit_for_bit(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    model = random_hf_model(*CASES["qwen2-untied"], source)
    model.to(torch.bfloat16).save_pretrained(source, max_shard_size="40KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    (source / "tokenizer_config.json").write_text('{"any": "side file"}')
    params, card = huggingface.load_params(source)
    assert len(set(card.tensor_files.values())) > 1
    huggingface.save_hf(params, card, copy)
    names = sorted(p.name for p in source.iterdir())
    assert [CHECKSUMS, *names] == sorted(p.name for p in copy.iterdir())
    for name in names:
        if not name.endswith(".index.json"):
            assert (source / name).read_bytes() == (copy / name).read_bytes(), name


def test_a_single_file_comes_back_bit_for_bit(tmp_path):
    random_hf_model(*CASES["llama-tied"], tmp_path / "source")
    params, card = huggingface.load_params(tmp_path / "source")
    huggingface.save_hf(params, card, tmp_path / "copy")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "source" / name).read_bytes() == (tmp_path / "copy" / name).read_bytes()


def test_a_model_that_began_here_opens_in_transformers_with_the_same_logits(tmp_path):
    from manus_jax.models.architecture import Architecture
    from manus_jax.models.transformer import init_params

    for family, options in {
        "qwen2": {"qkv_bias": True},
        "qwen3": {"qk_norm": True, "tie_embeddings": False},
        "llama": {},
    }.items():
        arch = Architecture(family, 64, 32, 48, 2, 4, 2, 8, initializer_range=0.3, **options)
        params = init_params(Transformer, arch, Compute(), seed=3)
        huggingface.save_hf(params, huggingface.new_card(arch, None), tmp_path / family)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family).eval()
        ids = np.arange(60, dtype=np.int32)[None]
        with torch.no_grad():
            expected = model(torch.tensor(ids, dtype=torch.long)).logits.numpy()
        np.testing.assert_allclose(our_logits(tmp_path / family, ids), expected, atol=1e-4, rtol=0)


def test_bfloat16_compute_stays_near_float32(tmp_path):
    random_hf_model("Qwen3", {**CASES["qwen3-tied"][1], "initializer_range": 0.05}, tmp_path)
    params, card = huggingface.load_params(tmp_path)
    ids = np.arange(64, dtype=np.int32)[None]
    args = (ids, np.ones_like(ids), ids)
    logits = {}
    for dtype in ("float32", "bfloat16"):
        graphdef, _ = abstract_model(Transformer, card.architecture, Compute(dtype=dtype))
        logits[dtype] = nnx.merge(graphdef, params)(*args)
    assert logits["bfloat16"].dtype == jnp.float32
    spread = float(jnp.std(logits["float32"]))
    assert float(jnp.abs(logits["bfloat16"] - logits["float32"]).max()) < 0.1 * spread
