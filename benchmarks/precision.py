"""Compares logits of this project and of transformers + torch with logits in float64, on the CPU.

    python benchmarks/precision.py MODEL_DIR [--lengths 256 1024 2048] [--text README.md]

The model reads the first tokens of a text. For float32 and bfloat16, `max` and `rms` are the
largest difference from the logits that torch computes in float64 and the root of the mean square,
and `ratio` is ours divided by torch's. Requires torch.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Python puts this folder first on the path, where envs.py would hide the package `envs`.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)

import numpy as np

ROOT = Path(__file__).parents[1]


def our_logits(directory: Path, ids: np.ndarray, dtype: str) -> np.ndarray:
    import jax
    from flax import nnx

    from manus_jax.models import huggingface
    from manus_jax.models.transformer import Compute, Transformer, abstract_model

    params, card = huggingface.load_params(directory)
    graphdef, _ = abstract_model(Transformer, card.architecture, Compute(dtype=dtype))
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    forward = jax.jit(lambda p, *args: nnx.merge(graphdef, p)(*args))
    return np.asarray(forward(params, ids, np.ones_like(ids), positions), np.float64)[0]


def torch_logits(directory: Path, ids: np.ndarray, dtype: str) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.no_grad():
        logits = model(torch.tensor(ids, dtype=torch.long)).logits
    return logits.to(torch.float64).numpy()[0]


def distance(logits: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    difference = logits - exact
    return {
        "max": float(np.abs(difference).max()),
        "rms": float(np.sqrt(np.mean(difference**2))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--text", type=Path, default=ROOT / "README.md")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    text = args.text.read_text()
    all_ids = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
    result: dict[str, Any] = {"benchmark": "precision", "model": args.model.name, "lengths": {}}
    for length in args.lengths:
        if length > len(all_ids):
            raise SystemExit(f"{args.text} has only {len(all_ids)} tokens")
        ids = np.array([all_ids[:length]], np.int32)
        exact = torch_logits(args.model, ids, "float64")
        found: dict[str, Any] = {"largest_logit": float(np.abs(exact).max())}
        for dtype in ("float32", "bfloat16"):
            ours = distance(our_logits(args.model, ids, dtype), exact)
            peer = distance(torch_logits(args.model, ids, dtype), exact)
            ratio = {name: round(ours[name] / peer[name], 2) for name in ours}
            found[dtype] = {"ours": ours, "torch": peer, "ratio": ratio}
        result["lengths"][length] = found
    print(json.dumps(result))


if __name__ == "__main__":
    main()
