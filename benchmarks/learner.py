"""Compares the update step with transformers + torch on this machine's CPU.

    python benchmarks/learner.py [--rounds 5]

Both sides train the same Qwen3-style model (8 layers, hidden 512, vocabulary 32k, float32) on the
same RL batch (PPO clip, AdamW, gradient clipping), each in its own worker process, with alternating
steps. The case `equal` has 8 sequences of 512 tokens, all trained. The case `ragged` is a
multi-turn batch with lengths from 64 to 512, in which a third of the tokens are trained; the torch
side pads it to 512. Requires torch.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Python puts this folder first on the path, where envs.py would hide the package `envs`.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)

import numpy as np

LENGTH, ROWS, VOCAB = 512, 8, 32_768
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
}
LEARNING_RATE, CLIP = 1e-4, 0.2


def trajectories(case: str) -> list[dict[str, np.ndarray]]:
    """Token ids, agent mask, advantages and old log-probs of each trajectory."""
    rng = np.random.default_rng(0)
    lengths = [LENGTH] * ROWS if case == "equal" else list(np.linspace(64, LENGTH, 24).astype(int))
    out = []
    for n in lengths:
        mask = np.ones(n, bool)
        if case == "ragged":
            # Turns of about 20 agent tokens after observations of about 40.
            mask = np.arange(n) % 60 >= 40
        mask[0] = False
        out.append(
            {
                "input_ids": rng.integers(0, VOCAB, n).astype(np.int32),
                "loss_mask": mask,
                "advantages": rng.normal(size=n).astype(np.float32),
                "old_log_probs": np.full(n, -10.4, np.float32),
            }
        )
    return out


def our_step(case: str, remat: str) -> Any:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from manus_jax.algorithms.recipes import RECIPES, policy_loss
    from manus_jax.config.settings import OptimizerSettings
    from manus_jax.data_proto import DataProto
    from manus_jax.learner import objectives
    from manus_jax.learner.learner import Learner, LearnerSpec
    from manus_jax.learner.mesh import make_mesh
    from manus_jax.learner.optimizer import learning_rate, make_optimizer
    from manus_jax.learner.packing import RowShape, add_packing
    from manus_jax.models.architecture import Architecture
    from manus_jax.models.transformer import Compute, Transformer, abstract_model, init_params

    mesh = make_mesh(devices=jax.devices()[:1])
    arch = Architecture("qwen3", **MODEL, qk_norm=True)
    compute = Compute(remat=remat)
    graphdef, shapes = abstract_model(Transformer, arch, compute)
    optimizer = make_optimizer(
        learning_rate(LEARNING_RATE, "constant", 0, 1, 0.0), OptimizerSettings()
    )
    recipe = RECIPES["dapo"]
    rows = 2
    data = trajectories(case)
    capacity = -(-len(data) // rows)
    spec = LearnerSpec(
        shapes,
        objectives.policy(graphdef, policy_loss(recipe)),
        lambda params, batch: objectives.log_probs_of(graphdef, params, batch)[0],
        optimizer,
        ("advantages", "old_log_probs", "sampler_log_probs"),
        RowShape(rows, LENGTH),
        capacity,
        capacity,
    )
    learner = Learner(init_params(Transformer, arch, compute, 0), spec, mesh)
    width = max(len(t["input_ids"]) for t in data)
    pad = lambda x: np.pad(x, (0, width - len(x)))
    columns = {name: np.stack([pad(t[name]) for t in data]) for name in data[0]}
    columns["sampler_log_probs"] = columns["old_log_probs"]
    columns["attention_mask"] = np.stack([pad(np.ones(len(t["input_ids"]), bool)) for t in data])

    def step() -> float:
        batch = add_packing(DataProto.from_dict(columns), LENGTH)
        return learner.update(batch)["loss"]

    return step


def torch_step(case: str) -> Any:
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=MODEL["hidden_size"],
        intermediate_size=MODEL["intermediate_size"],
        num_hidden_layers=MODEL["num_layers"],
        num_attention_heads=MODEL["num_heads"],
        num_key_value_heads=MODEL["num_kv_heads"],
        head_dim=MODEL["head_dim"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    data = trajectories(case)
    padded = {
        name: np.stack([np.pad(t[name], (LENGTH - len(t[name]), 0)) for t in data])
        for name in data[0]
    }
    padded["attention"] = np.stack(
        [
            np.pad(np.ones(len(t["input_ids"]), np.int64), (LENGTH - len(t["input_ids"]), 0))
            for t in data
        ]
    )
    total = float(padded["loss_mask"].sum())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for start in range(0, len(data), ROWS):
            batch = {k: torch.from_numpy(v[start : start + ROWS]) for k, v in padded.items()}
            ids = batch["input_ids"].long()
            positions = (batch["attention"].cumsum(1) - 1).clamp(min=0)
            mask = batch["attention"] if case == "ragged" else None
            logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            log_p = torch.log_softmax(logits[:, :-1], dim=-1)
            log_probs = log_p.gather(2, ids[:, 1:, None])[..., 0]
            ratio = torch.exp(log_probs - batch["old_log_probs"][:, 1:])
            advantages = batch["advantages"][:, 1:]
            surrogate = torch.minimum(
                ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
            )
            loss = -(surrogate * batch["loss_mask"][:, 1:]).sum() / total
            loss.backward()
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss_sum

    return step


def worker(side: str, case: str, remat: str) -> None:
    """Runs a step for each line on stdin and prints its duration in seconds."""
    step = torch_step(case) if side == "torch" else our_step(case, remat)
    for _ in range(2):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "memory":
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)
            continue
        began = time.perf_counter()
        step()
        print(time.perf_counter() - began, flush=True)


class Worker:
    def __init__(self, side: str, case: str, remat: str):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", side, "--case", case, "--remat", remat],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit(f"the {side} worker did not start")

    def ask(self, what: str) -> float:
        assert self.process.stdout is not None and self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(case: str, rounds: int, remat: str) -> dict[str, Any]:
    workers = {side: Worker(side, case, remat) for side in ("ours", "torch")}
    seconds: dict[str, list[float]] = {side: [] for side in workers}
    for _ in range(rounds):
        for side, w in workers.items():
            seconds[side].append(w.ask("step"))
    memory = {side: w.ask("memory") for side, w in workers.items()}
    for w in workers.values():
        w.close()
    tokens = sum(len(t["input_ids"]) for t in trajectories(case))
    per_s = {side: tokens / statistics.median(s) for side, s in seconds.items()}
    pairs = [t / o for o, t in zip(seconds["ours"], seconds["torch"], strict=True)]
    return {
        "tokens": tokens,
        "tokens_per_s": {k: round(v, 1) for k, v in per_s.items()},
        "speedup": round(statistics.median(pairs), 3),
        "speedup_by_round": [round(p, 3) for p in pairs],
        "peak_memory_gb": {k: round(v / 1e9, 2) for k, v in memory.items()},
        "memory_ratio": round(memory["ours"] / memory["torch"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--remat", default="minimal", help="our remat policy")
    parser.add_argument("--worker", choices=("ours", "torch"))
    parser.add_argument("--case", choices=("equal", "ragged"))
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.case, args.remat)
        return
    cases = [args.case] if args.case else ["equal", "ragged"]
    result = {
        "compared": "manus_jax update step / transformers + torch, float32, CPU",
        "remat": args.remat,
        **{case: compare(case, args.rounds, args.remat) for case in cases},
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
