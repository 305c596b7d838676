"""What it takes to hand a new version of the weights to a server: bytes and seconds.

    python benchmarks/weights.py --hidden 512 --layers 8 --change 0.01

A bfloat16 model is published, a share of its weights is changed, evenly spread, and it is published
again; a mirror, which is what a vLLM worker holds, then goes from the one version to the other. The
peer is what most systems do at every step: the whole model written with the safetensors library
(`save_file`) and read back. Both write to the same directory and both are run `--rounds` times; the
figures are medians. The last line printed is one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder comes first when the script is started

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, init_params
from manus_jax.weights.host_tensors import host_bytes, tensor_sources
from manus_jax.weights.mirror import Mirror
from manus_jax.weights.publisher import Publisher


def changed(params: Any, share: float, seed: int) -> Any:
    """About that share of the weights is another bfloat16 number."""
    rng = np.random.default_rng(seed)
    moved = lambda x: np.where(rng.random(x.shape) < share, x * 1.5 + 0.01, x).astype(np.float32)
    return jax.tree.map(lambda x: jax.device_put(moved(np.asarray(x))), params)


def whole_model(params: Any, card: huggingface.ModelCard, path: Path) -> None:
    """The peer's way: every tensor, in one file."""
    tensors = {}
    for name, source in tensor_sources(card).items():
        raw = host_bytes(params, source)
        tensors[name] = raw.view(np.uint16).reshape(source.spec.shape)
    save_file(tensors, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    heads = options.hidden // 64
    arch = Architecture(
        "qwen2",
        32_000,
        options.hidden,
        4 * options.hidden,
        options.layers,
        heads,
        heads,
        64,
        qkv_bias=True,
    )
    card = huggingface.new_card(arch, None, "bfloat16")
    params = init_params(Transformer, arch, Compute(), 0)
    publisher, mirror = Publisher(root / "versions", card, snapshot_every=1000), Mirror(root)
    publisher.publish(params, 0)
    mirror.advance(publisher.root, 0)
    rows: dict[str, list[float]] = {"publish": [], "load": [], "peer_publish": [], "peer_load": []}
    ours: list[int] = []
    peers: list[int] = []
    for version in range(1, options.rounds + 1):
        params = changed(params, options.change, version)
        whole = root / "whole.safetensors"
        steps: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "publish": (publisher.publish, (params, version)),
            "load": (mirror.advance, (publisher.root, version)),
            "peer_publish": (whole_model, (params, card, whole)),
            "peer_load": (load_file, (whole,)),
        }
        for name, (work, arguments) in steps.items():
            began = time.perf_counter()
            result = work(*arguments)
            rows[name].append(time.perf_counter() - began)
            if name == "publish":
                ours.append(result.delta_bytes)
        peers.append(whole.stat().st_size)
    publisher.close()
    mirror.close()
    medians = {name: round(statistics.median(values), 4) for name, values in rows.items()}
    moved, whole_size = statistics.median(ours), statistics.median(peers)
    return {
        "parameters": arch.num_params,
        "changed_share": options.change,
        "delta_bytes": int(moved),
        "whole_bytes": int(whole_size),
        "bytes_ratio": round(moved / whole_size, 5),
        "seconds": medians,
        "speedup": round(
            (medians["peer_publish"] + medians["peer_load"])
            / (medians["publish"] + medians["load"]),
            2,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--change", type=float, default=0.01, help="share of weights, 0.01")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        row = measure(options, Path(directory))
    report = {
        "benchmark": "weights",
        "compared": "publishing and loading what changed, against the whole model by safetensors",
        **row,
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
