"""Compares the embedded engine with transformers' `generate` on this machine's CPU.

    python benchmarks/rollout.py [--rounds 5]

Both sides use the same random Qwen3-style model (8 layers, hidden 512, vocabulary 32k, float32,
tied), each in its own worker process, with alternating runs, and sample at temperature 1.
`single_turn` has 16 prompts of 64 tokens with 64 new tokens each. `episodes` has 16 episodes of
five turns with 64 observation tokens and 64 sampled tokens; `generate` gets the whole history in
every turn, and the engine keeps its cache between turns. `in_flight` measures the engine alone with
256 concurrent episodes, in an environment with 200 ms per step and in one without delay; busy is
the fraction of time in which the device computes. Requires torch, which uses the faster of one
thread and all threads, without spinning.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python puts this folder first on the path, where envs.py would hide the package `envs`.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)

import numpy as np

MODEL = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
}
BATCH, NEW, TURNS = 16, 64, 5
EPISODES, STEP_SECONDS = 256, 0.2

Generate = Callable[[np.ndarray, bool], np.ndarray]
"""(ids [rows, length], whether to decode greedily) → new ids [rows, NEW]."""


def observations(seed: int, rows: int = BATCH, length: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MODEL["vocab_size"], (rows, length))


def write_model(directory: Path) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from manus_jax.models import huggingface
    from manus_jax.models.architecture import Architecture
    from manus_jax.models.transformer import Compute, Transformer, init_params

    arch = Architecture("qwen3", **MODEL, qk_norm=True)
    params = init_params(Transformer, arch, Compute(), 0)
    huggingface.save_hf(params, huggingface.new_card(arch, None), directory)


def our_engine(directory: Path, slots: int, max_length: int) -> Any:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from manus_jax.engines.jax_engine import JaxEngine
    from manus_jax.models import huggingface

    params, card = huggingface.load_params(directory)
    return JaxEngine(card.architecture, params, slots=slots, max_length=max_length)


def our_generate(directory: Path) -> Generate:
    from manus_jax.engines.protocol import Request, Sampling

    engine = our_engine(directory, BATCH, 64 + 2 * NEW * TURNS)
    calls = iter(range(1_000_000))

    def generate(ids: np.ndarray, greedy: bool) -> np.ndarray:
        if ids.shape[1] == 64:  # a new batch of episodes
            for row in range(len(ids)):
                engine.release(str(row))
        how = Sampling(temperature=0.0 if greedy else 1.0, max_tokens=NEW)
        futures = [
            engine.submit(Request(tuple(row.tolist()), how, next(calls), str(i)))
            for i, row in enumerate(ids)
        ]
        return np.array([f.result().token_ids for f in futures])

    return generate


def peer_generate(directory: Path) -> Generate:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    length = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
    sampled = transformers.GenerationConfig(**length, do_sample=True, top_k=0)
    likeliest = transformers.GenerationConfig(**length, do_sample=False)

    def generate(ids: np.ndarray, greedy: bool) -> np.ndarray:
        with torch.inference_mode():
            prompt = torch.tensor(ids, dtype=torch.long)
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=likeliest if greedy else sampled,
            )
        return out[:, ids.shape[1] :].numpy()

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        play(generate, 1, 0)
        return time.perf_counter() - began

    play(generate, 1, 0)
    torch.set_num_threads(min({1, os.cpu_count() or 1}, key=seconds))
    return generate


def play(generate: Generate, turns: int, seed: int) -> None:
    """Plays a batch of episodes of `turns` turns in lockstep."""
    history = np.zeros((BATCH, 0), np.int64)
    for turn in range(turns):
        history = np.concatenate([history, observations(seed + turn)], axis=1)
        history = np.concatenate([history, generate(history, False)], axis=1)


def worker(side: str, directory: Path) -> None:
    """Prints a line of JSON for each line on stdin, `greedy` or a number of turns."""
    generate = (our_generate if side == "ours" else peer_generate)(directory)
    play(generate, 1, 0)
    print(json.dumps("ready"), flush=True)
    for seed, line in enumerate(sys.stdin):
        if line.strip() == "greedy":
            print(json.dumps(generate(observations(99), True).tolist()), flush=True)
            continue
        began = time.perf_counter(), time.process_time()
        play(generate, int(line), (seed + 1) * 100)
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        print(json.dumps(spent), flush=True)


class Worker:
    def __init__(self, side: str, directory: Path):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", side, "--model", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        if self.answer() != "ready":
            raise SystemExit(f"the {side} worker did not start")

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or "null")

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(workers: dict[str, Worker], turns: int, rounds: int) -> dict[str, Any]:
    """Speed in wall-clock time, and in CPU time, which is less sensitive to other load."""
    spent: dict[str, list[tuple[float, float]]] = {side: [] for side in workers}
    for _ in range(rounds):
        for side, w in workers.items():
            spent[side].append(w.ask(str(turns)))
    tokens = BATCH * NEW * turns
    wall = {side: statistics.median(s for s, _ in times) for side, times in spent.items()}
    pairs = list(zip(spent["ours"], spent["transformers"], strict=True))
    by_round = [peer[0] / ours[0] for ours, peer in pairs]
    return {
        "tokens_per_s": {side: round(tokens / s, 1) for side, s in wall.items()},
        "speedup": round(statistics.median(by_round), 3),
        "speedup_by_round": [round(x, 3) for x in by_round],
        "cpu_speedup": round(statistics.median(peer[1] / ours[1] for ours, peer in pairs), 3),
    }


def in_flight(
    engine: Any, step_seconds: float, seed: int, turns: int = 3, new: int = 16
) -> dict[str, float]:
    """Runs all episodes concurrently, each in a thread that alternates generation and waiting."""
    from manus_jax.engines.protocol import Request, Sampling

    before = engine.metrics()

    def episode(number: int) -> None:
        ids: list[int] = observations(number + seed, 1, 48)[0].tolist()
        session = f"{seed + number}"
        for turn in range(turns):
            how = Sampling(max_tokens=new)
            ids += engine.submit(Request(tuple(ids), how, number, session)).result().token_ids
            time.sleep(step_seconds)
            ids += observations(number + turn, 1, 16)[0].tolist()
        engine.release(session)

    threads = [threading.Thread(target=episode, args=(i,)) for i in range(EPISODES)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - began
    spent = {k: v - before[k] for k, v in engine.metrics().items()}
    return {
        "seconds": round(wall, 2),
        "tokens_per_s": round(spent["generated_tokens"] / wall, 1),
        "busy_ratio": round(spent["busy_seconds"] / wall, 4),
        "prefill_tokens": spent["prefill_tokens"],
        "reused_tokens": spent["reused_tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", choices=("ours", "transformers"))
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.model)
        return
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work) / "model"
        write_model(directory)
        workers = {side: Worker(side, directory) for side in ("ours", "transformers")}
        greedy = [w.ask("greedy") for w in workers.values()]
        same = float(np.mean(np.array(greedy[0]) == np.array(greedy[1])))
        single = compare(workers, 1, args.rounds)
        episodes = compare(workers, TURNS, max(1, args.rounds // 2))
        for w in workers.values():
            w.close()
        engine = our_engine(directory, EPISODES, 256)
        in_flight(engine, 0.0, 1000)  # compiles all programs
        slow, instant = in_flight(engine, STEP_SECONDS, 2000), in_flight(engine, 0.0, 3000)
        engine.close()
    result = {
        "compared": "manus_jax JaxEngine / transformers generate, sampling, float32, CPU",
        "greedy_tokens_agree": same,
        "single_turn": single,
        "episodes": episodes,
        "in_flight": {
            "episodes": EPISODES,
            "environment_200ms": slow,
            "environment_instant": instant,
            "busy_ratio": slow["busy_ratio"],
            "slowdown": round(slow["seconds"] / instant["seconds"], 3),
        },
        "speedup": {"single_turn": single["speedup"], "episodes": episodes["speedup"]},
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
