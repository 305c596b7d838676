"""Measures weight updates of a vLLM server during generation, in bytes and seconds.

    MANUS_JAX_VLLM_PYTHON=vllm/bin/python python benchmarks/weights.py

A vLLM server with a model of SmolLM2's shape (135M parameters, random weights) repeatedly loads new
bfloat16 weights while one request generates: versions in which every weight changes, and versions
in which a fraction of the weights, evenly distributed, changes. The server computes in float32 by
default, because few CPUs multiply in bfloat16. The baselines are writing the bytes of the whole
model to the same disk and reading them back, and sending the same requests directly to vLLM,
without the pool. Both sides alternate for `--rounds` rounds, and the figures are medians. The last
line of output is one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.pop(0)  # Python puts the folder of the script first on the path

import jax
import numpy as np
import requests

from manus_jax.config.server_settings import VllmSettings
from manus_jax.data.chat import train_tokenizer
from manus_jax.engines.protocol import Request, Sampling
from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, init_params
from manus_jax.vllm.client import VllmServer
from manus_jax.vllm.open_pool import open_vllm
from manus_jax.vllm.pool import VllmPool
from manus_jax.weights.manifest import DELTA, read_manifest

ARCH = Architecture("llama", 49_152, 576, 1536, 30, 9, 3, 64, rope_theta=1e5, norm_eps=1e-5)
MAX_LENGTH = 2048
PROMPT = 64
HTTP = requests.Session()


def changed(params: Any, share: float, seed: int) -> Any:
    """Changes about this fraction of the weights to a different bfloat16 value."""
    rng = np.random.default_rng(seed)

    def moved(leaf: jax.Array) -> jax.Array:
        x = np.asarray(leaf)
        chosen = rng.random(x.shape, np.float32) < share
        return jax.device_put(np.where(chosen, x * np.float32(1.02) + np.float32(1e-4), x))

    return jax.tree.map(moved, params)


def write_and_read(count: int, path: Path) -> float:
    """Seconds to write `count` bytes to disk and read them back."""
    data = np.random.default_rng(0).integers(0, 256, count, np.uint8)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        file.write(data.data)
        os.fsync(file.fileno())
    np.fromfile(path, np.uint8)
    return time.perf_counter() - began


class LongRequest:
    """A generation streamed directly from vLLM; records the arrival time of each token."""

    def __init__(self, url: str) -> None:
        self.came: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,), daemon=True)
        self._thread.start()
        while len(self.came) < 8:
            time.sleep(0.01)

    def _run(self, url: str) -> None:
        body = {"model": "policy", "prompt": list(range(100, 100 + PROMPT)), "stream": True}
        body |= {"max_tokens": MAX_LENGTH - PROMPT, "ignore_eos": True, "seed": 1}
        with HTTP.post(f"{url}/v1/completions", json=body, stream=True, timeout=600) as answer:
            for line in answer.iter_lines():
                if line:
                    self.came.append(time.perf_counter())
                if self._stop.is_set():
                    return

    def longest_wait(self, began: float, ended: float) -> float:
        """The longest time without a token between two times."""
        while self.came[-1] < ended:
            time.sleep(0.005)
        self._stop.set()
        self._thread.join()
        times = np.array(self.came)
        times = times[np.searchsorted(times, began) - 1 : np.searchsorted(times, ended) + 1]
        return float(np.diff(times).max())


class Updates:
    """Pushes versions to a server and records the cost of each."""

    def __init__(self, pool: VllmPool, url: str, root: Path, params: Any) -> None:
        self._pool, self._url, self._root, self._params = pool, url, root, params
        self.rows: list[dict[str, float]] = []

    def push(self, share: float, note: bool) -> None:
        version = self._pool.version + 1
        self._params = changed(self._params, share, version)
        counters = f"server/{self._url.removeprefix('http://')}/paused_seconds"
        paused = self._pool.metrics()[counters]
        request = LongRequest(self._url)
        began = time.perf_counter()
        self._pool.update_weights(self._params, version)
        ended = time.perf_counter()
        waited = request.longest_wait(began, ended)
        moved = read_manifest(self._root / "weights" / "versions", version).files[DELTA].nbytes
        whole = 2 * ARCH.num_params
        if note:
            self.rows.append(
                {
                    "seconds": ended - began,
                    "paused_seconds": self._pool.metrics()[counters] - paused,
                    "longest_wait_of_a_request": waited,
                    "bytes": moved,
                    "write_and_read_whole": write_and_read(whole, self._root / "bytes"),
                }
            )

    def medians(self) -> dict[str, float]:
        found = {key: statistics.median(row[key] for row in self.rows) for key in self.rows[0]}
        ratios = {
            "seconds_ratio": found["seconds"] / found["write_and_read_whole"],
            "pause_share": found["longest_wait_of_a_request"] / found["seconds"],
            "pause_of_write_and_read": found["longest_wait_of_a_request"]
            / found["write_and_read_whole"],
            "bytes_ratio": found["bytes"] / (2 * ARCH.num_params),
        }
        return {key: round(value, 4) for key, value in {**found, **ratios}.items()}


def requests_of(round_: int, count: int, tokens: int) -> list[Request]:
    rng = np.random.default_rng(round_)
    prompts = rng.integers(0, ARCH.vocab_size, (count, PROMPT)).tolist()
    return [
        Request(tuple(prompt), Sampling(max_tokens=tokens), n, f"{round_}-{n}")
        for n, prompt in enumerate(prompts)
    ]


def tokens_per_second(pool: VllmPool, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Throughput with and without the pool, alternating, each time with an empty cache."""
    server = VllmServer(url, api_key=pool._api_key)
    server.examine(1, False, None)
    count = options.requests

    def straight(asked: list[Request]) -> list[Any]:
        with ThreadPoolExecutor(count) as threads:
            return list(
                threads.map(lambda r: server.generate(r, r.session, lambda _: 0, None), asked)
            )

    def pooled(asked: list[Request]) -> list[Any]:
        return [future.result() for future in [pool.submit(request) for request in asked]]

    ways: dict[str, Callable[[list[Request]], list[Any]]] = {"pool": pooled, "straight": straight}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(options.rounds + 1):
        asked = requests_of(round_, count, options.tokens)
        for name, way in sorted(ways.items(), reverse=bool(round_ % 2)):
            HTTP.post(f"{url}/reset_prefix_cache", timeout=60)
            began = time.perf_counter()
            made = sum(len(generation.token_ids) for generation in way(asked))
            if round_:  # the first round is a warm-up
                rates[name].append(made / (time.perf_counter() - began))
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    pairs = zip(rates["pool"], rates["straight"], strict=True)
    ratios = [round(ours / theirs, 4) for ours, theirs in pairs]
    return {
        "tokens_per_second": medians,
        "throughput_ratio": round(statistics.median(ratios), 4),
        "throughput_ratios": ratios,  # a large spread means that the machine had other load
    }


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    (root / "tokenizer").mkdir()
    train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 3, 300, root / "tokenizer")
    card = huggingface.new_card(ARCH, root / "tokenizer", "bfloat16")
    params = init_params(Transformer, ARCH, Compute(), 0)
    settings = VllmSettings(servers=1, weights_dir=str(root / "weights"), snapshot_every=10_000)
    pool = open_vllm(
        card, params, settings, slots=options.requests, dtype=options.dtype, max_length=MAX_LENGTH
    )
    try:
        (url,) = pool._members
        HTTP.headers["Authorization"] = f"Bearer {pool._api_key}"
        results: dict[str, Any] = {}
        for name, share in (("all_changed", 1.0), ("some_changed", options.change)):
            updates = Updates(pool, url, root, params)
            for round_ in range(options.rounds + 1):
                updates.push(share, note=round_ > 0)
            results[name] = updates.medians()
        return {**results, **tokens_per_second(pool, url, options)}
    finally:
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--change", type=float, default=0.01, help="share of weights, 0.01")
    parser.add_argument("--dtype", default="float32", help="vLLM computes in (float32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16, help="at once, for tokens/s (16)")
    parser.add_argument("--tokens", type=int, default=64, help="of each of them (64)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        row = measure(options, Path(directory))
    report = {
        "benchmark": "weights",
        "compared": "new weights for a vLLM server that generates, against writing and reading the "
        "whole model's bytes; requests through the pool, against straight to vLLM",
        "parameters": ARCH.num_params,
        "changed_share": options.change,
        "served_in": options.dtype,
        **row,
        "machine": {
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
