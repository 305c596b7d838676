"""Compares the update of the same segments packed into short and into long rows, on one CPU core.

    python benchmarks/long_rows.py [--rounds 5] [--lengths 256 512 1024 2048]

A batch of 32 segments of 256 tokens, a third of them trained, is packed into rows of each length;
the steps alternate. Without skipping blocks of attention, the time per token would grow with the
length of a row. `ratio` is the speed relative to the first length, the median over the rounds.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python puts this folder first on the path, where envs.py would hide the package `envs`.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)

SEGMENTS, SEGMENT = 32, 256
MODEL = {
    "vocab_size": 600,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}


def update_step(length: int) -> Callable[[], Any]:
    """A function that runs one update with rows of `length` tokens, 2,048 tokens at a time."""
    import jax
    import numpy as np

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

    arch, compute = Architecture("qwen3", **MODEL, qk_norm=True), Compute(remat="minimal")
    graphdef, shapes = abstract_model(Transformer, arch, compute)
    rows = max(1, 2048 // length)
    capacity = -(-SEGMENTS * SEGMENT // (rows * length))
    spec = LearnerSpec(
        shapes,
        objectives.policy(graphdef, policy_loss(RECIPES["dapo"])),
        lambda params, batch: objectives.log_probs_of(graphdef, params, batch)[0],
        make_optimizer(learning_rate(1e-4, "constant", 0, 1, 0.0), OptimizerSettings()),
        ("advantages", "old_log_probs", "sampler_log_probs"),
        RowShape(rows, length),
        capacity,
        capacity,
    )
    params = init_params(Transformer, arch, compute, 0)
    learner = Learner(params, spec, make_mesh(devices=jax.devices()[:1]))
    rng, shape = np.random.default_rng(0), (SEGMENTS, SEGMENT)
    log_probs = np.full(shape, -6.4, np.float32)
    batch = DataProto.from_dict(
        {
            "input_ids": rng.integers(0, MODEL["vocab_size"], shape).astype(np.int32),
            "attention_mask": np.ones(shape, bool),
            "loss_mask": np.broadcast_to(np.arange(SEGMENT) % 60 >= 40, shape),
            "advantages": rng.normal(size=shape).astype(np.float32),
            "old_log_probs": log_probs,
            "sampler_log_probs": log_probs,
        }
    )
    batch = add_packing(batch, length)
    return lambda: learner.update(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # before JAX counts the cores
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["JAX_PLATFORMS"] = "cpu"
    steps = {length: update_step(length) for length in args.lengths}
    seconds: dict[int, list[float]] = {length: [] for length in steps}
    for step in steps.values():
        step()  # compiles
    for _ in range(args.rounds):
        for length, step in steps.items():
            # Processor time, because other programs may use the core.
            began = time.process_time()
            step()
            seconds[length].append(time.process_time() - began)
    first = seconds[args.lengths[0]]
    ratio = {n: [a / b for a, b in zip(first, s, strict=True)] for n, s in seconds.items()}
    tokens = SEGMENTS * SEGMENT
    result = {
        "compared": f"update of segments of {SEGMENT} tokens in rows of each length / in rows of "
        f"{args.lengths[0]}, float32, one core, processor time",
        "tokens_per_s": {n: round(tokens / statistics.median(s)) for n, s in seconds.items()},
        "ratio": {n: round(statistics.median(r), 3) for n, r in ratio.items()},
        "ratio_by_round": {n: [round(x, 3) for x in r] for n, r in ratio.items()},
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
