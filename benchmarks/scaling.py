"""Compiles the update step for 1, 2, 4 and 8 devices and reports the work per device.

    python benchmarks/scaling.py [--devices 1 2 4 8]

The same model and batch are fully sharded (FSDP) over CPU devices. The report contains, per device,
the FLOPs of all matrix products, the bytes sent in collectives (loop bodies times the number of
iterations) and the peak memory. In theory, FLOPs are proportional to 1/n. In the layers, each
device receives the part of every weight that it does not hold, (n-1)/n of it, twice per micro-batch
(forward, and backward with remat). Gradients are reduced once, with twice the bytes if the compiler
uses an all-reduce and discards the rest, as XLA's CPU compiler does. The head is gathered and its
gradient scattered once per micro-batch, and token embeddings are sent in both directions. The state
takes 12/n bytes per parameter.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

# Python puts this folder first on the path, where envs.py would hide the package `envs`.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from manus_jax.algorithms.recipes import RECIPES, policy_loss
from manus_jax.config.settings import OptimizerSettings
from manus_jax.learner import objectives
from manus_jax.learner.learner import LearnerSpec
from manus_jax.learner.mesh import make_mesh
from manus_jax.learner.optimizer import learning_rate, make_optimizer
from manus_jax.learner.packing import RowShape
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import AttentionKernel
from manus_jax.models.log_probs import chunk_size
from manus_jax.models.transformer import Compute, Transformer, abstract_model
from manus_jax.planning.collectives import find_collectives, instructions
from manus_jax.planning.compiling import (
    abstract_arguments,
    lower_update,
    peak_bytes,
)

TRAINED = 0.25
ARCHITECTURE = Architecture(
    "qwen3", 4096, 256, 768, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shape of a packed batch."""

    micro_batches: int
    rows: int
    length: int


LAYOUT = Layout(micro_batches=2, rows=8, length=512)


def design(arch: Architecture, layout: Layout, mesh: jax.sharding.Mesh) -> LearnerSpec:
    """The spec of a GRPO update in float32 with full remat, built as in training."""
    recipe = RECIPES["grpo"]
    kernel = AttentionKernel("plain", mesh)
    graphdef, shapes = abstract_model(Transformer, arch, Compute("float32", "full", kernel))
    rate = learning_rate(1e-6, "constant", 0, 1, 0.0)
    return LearnerSpec(
        shapes,
        objectives.policy(graphdef, policy_loss(recipe)),
        lambda params, batch: objectives.log_probs_of(graphdef, params, batch)[0],
        make_optimizer(rate, OptimizerSettings()),
        tuple(f for f in recipe.loss_fields if f not in ("mask", "segment_ids", "entropy")),
        RowShape(layout.rows, layout.length),
        layout.micro_batches,
        layout.micro_batches,
    )


def measure(arch: Architecture, layout: Layout, devices: int) -> dict[str, Any]:
    """The work per device of an update on `devices` devices, and the predicted bytes."""
    mesh = make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    made = design(arch, layout, mesh)
    compiled = lower_update(made, mesh).compile()
    memory: Any = compiled.memory_analysis()
    tokens = layout.rows * layout.length // devices
    loops = (layout.micro_batches, math.ceil(TRAINED * tokens / chunk_size(tokens)))
    text = compiled.as_text() or ""
    found = find_collectives(text, loops, devices)
    kinds: dict[str, float] = {}
    for c in found:
        kinds[c.kind] = kinds.get(c.kind, 0.0) + c.sent * c.count
    matrices, everything = layer_parameters(made, mesh)
    sent = layout.micro_batches * (devices - 1) / devices
    layers = sent * 4 * (2 * matrices + 2 * everything)
    head = sent * 4 * 2 * arch.vocab_size * arch.hidden_size
    embedding = sent * 4 * 2 * layout.rows * layout.length / devices * arch.hidden_size
    return {
        "devices": devices,
        "flops": product_flops(text, loops),
        "collectives": kinds,
        "collective_bytes": sum(kinds.values()),
        "collective_bytes_expected": layers + head + embedding,
        "layer_collective_bytes": sum(
            c.sent * c.count for c in found if arch.num_layers in c.loops[1:2]
        ),
        "layer_collective_bytes_expected": layers,
        "peak_memory": peak_bytes(memory),
        "state": memory.argument_size_in_bytes,
    }


def product_flops(text: str, loops: tuple[int, ...]) -> float:
    """FLOPs of the matrix products of a compiled module; loop bodies count once per iteration."""
    shapes = dict(re.findall(r"%(\S+) = \w+\[([\d,]*)\]", text))
    total = 0.0
    for i in instructions(text, loops):
        if i.opcode != "dot":
            continue
        left = re.findall(r" dot\(%([^\s,]+)", i.line)[0]
        contracted = re.findall(r"lhs_contracting_dims=\{([\d,]+)\}", i.line)[0]
        sizes = [int(n) for n in shapes[left].split(",")]
        depth = math.prod(sizes[int(axis)] for axis in contracted.split(","))
        result = math.prod(int(n) for n in re.findall(r"\[([\d,]*)\]", i.result)[0].split(","))
        total += 2.0 * result * depth * math.prod(i.loops)
    return total


def layer_parameters(made: LearnerSpec, mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """The number of sharded parameters in the layers, and of all their parameters.

    Norms are replicated: they are not gathered, but their gradients are reduced.
    """
    state, _, _ = abstract_arguments(made, mesh)
    layers = jax.tree.leaves(state.params["backbone"]["layers"])
    split = [x for x in layers if len(x.sharding.spec)]
    return sum(math.prod(x.shape) for x in split), sum(math.prod(x.shape) for x in layers)


def compare(arch: Architecture, layout: Layout, counts: list[int]) -> dict[str, Any]:
    """Measures all device counts; ratios are relative to the theory, so 1 is agreement."""
    rows = [measure(arch, layout, n) for n in counts]
    first = rows[0]
    for row in rows:
        n = row["devices"] / first["devices"]
        row["flops_ratio"] = row["flops"] * n / first["flops"]
        row["state_ratio"] = row["state"] * n / first["state"]
        row["peak_memory_ratio"] = row["peak_memory"] * n / first["peak_memory"]
        for name in ("collective", "layer_collective"):
            expected = row[f"{name}_bytes_expected"]
            row[f"{name}_ratio"] = row[f"{name}_bytes"] / expected if expected else 1.0
    return {
        "compared": "the update step on n devices / on one, compiled, per device",
        "model": {"parameters": arch.num_params, "layers": arch.num_layers},
        "batch": vars(layout),
        "scaling": rows,
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(args.devices))
    print(json.dumps(compare(ARCHITECTURE, LAYOUT, args.devices)))


if __name__ == "__main__":
    main()
