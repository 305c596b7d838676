"""The update step over 1, 2, 4 and 8 devices, by what XLA compiled for each of them, not the clock.

    python benchmarks/scaling.py [--devices 1 2 4 8]

The same model and the same batch, fully sharded (FSDP) over CPU devices. From each compiled module,
per device: FLOPs of all matrix products, bytes to and from memory, bytes sent in collectives (every
loop's body times its length) and peak memory. Theory says: FLOPs fall as 1/n. In the layers, each
device receives the (n-1)/n of every weight that it does not hold, twice a micro-batch (forward,
and backward with remat), and the gradients go the same way once, twice as far on a back end that
reduces them whole and keeps its part (XLA's CPU one does). The head is gathered and its gradient
scattered once a micro-batch, tokens' embeddings travel there and back. The state takes 12 bytes
per parameter, over n.
"""

import argparse
import json
import math
import os
import platform
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from manus_jax.algorithms.recipes import RECIPES, policy_loss
from manus_jax.learner import objectives
from manus_jax.learner.learner import Design
from manus_jax.learner.mesh import make_mesh
from manus_jax.learner.optimizer import adamw, learning_rate
from manus_jax.learner.packing import Layout
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import AttentionKernel
from manus_jax.models.log_probs import chunk_size
from manus_jax.models.transformer import Compute, Transformer, abstract_model
from manus_jax.planning.compiling import (
    abstract_arguments,
    compile_update,
    lower_update,
    policy_fields,
)
from manus_jax.planning.module_costs import ModuleCosts, by_kind, module_costs

TRAINED = 0.25
ARCHITECTURE = Architecture(
    "qwen3", 4096, 256, 768, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True
)
LAYOUT = Layout(micro_batches=2, rows=8, length=512)


def design(arch: Architecture, layout: Layout, mesh: jax.sharding.Mesh) -> Design:
    """GRPO's update in float32 with full remat, as training designs it."""
    recipe = RECIPES["grpo"]
    kernel = AttentionKernel("plain", mesh)
    graphdef, shapes = abstract_model(Transformer, arch, Compute("float32", "full", kernel))
    rate = learning_rate(1e-6, "constant", 0, 1, 0.0)
    return Design(
        shapes,
        objectives.policy(graphdef, policy_loss(recipe)),
        lambda params, batch: objectives.log_probs_of(graphdef, params, batch)[0],
        adamw(rate, 0.01, 0.9, 0.999, 1e-8, 1.0),
        layout,
    )


def measure(arch: Architecture, layout: Layout, devices: int) -> dict[str, Any]:
    """What one of `devices` devices does in an update, and what theory says that it sends."""
    mesh = make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    made, fields = design(arch, layout, mesh), policy_fields(RECIPES["grpo"])
    memory, text = compile_update(lower_update(made, mesh, fields))
    tokens = layout.rows * layout.length // devices
    loops = (layout.micro_batches, math.ceil(TRAINED * tokens / chunk_size(tokens)))
    costs = module_costs(text, loops, devices)
    matrices, everything = layer_parameters(made, mesh)
    sent = layout.micro_batches * (devices - 1) / devices
    layers = sent * 4 * (2 * matrices + 2 * everything)
    head = sent * 4 * 2 * arch.vocab_size * arch.hidden_size
    embedding = sent * 4 * 2 * layout.rows * layout.length / devices * arch.hidden_size
    return {
        "devices": devices,
        "flops": costs.flops,
        "memory_traffic": costs.bytes,
        "collectives": {kind: sent for kind, (_, sent) in by_kind(costs.collectives).items()},
        "collective_bytes": costs.wire_bytes,
        "collective_bytes_expected": layers + head + embedding,
        "layer_collective_bytes": layer_bytes(costs, arch),
        "layer_collective_bytes_expected": layers,
        "peak_memory": memory.peak,
        "state": memory.arguments,
    }


def layer_bytes(costs: ModuleCosts, arch: Architecture) -> float:
    """Bytes that a device sends inside the loops over layers."""
    return sum(c.wire_bytes for c in costs.collectives if arch.num_layers in c.loops[1:2])


def layer_parameters(made: Design, mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """Parameters of all layers that are split over devices, and all of them.

    Norms lie on every device whole: nothing is gathered of them, but they have gradients.
    """
    state, _, _ = abstract_arguments(made, mesh, ())
    layers = jax.tree.leaves(state.params["backbone"]["layers"])
    split = [x for x in layers if len(x.sharding.spec)]
    return sum(math.prod(x.shape) for x in split), sum(math.prod(x.shape) for x in layers)


def compare(arch: Architecture, layout: Layout, counts: list[int]) -> dict[str, Any]:
    """All counts, with ratios to what theory says: 1 is agreement, on the first count by itself."""
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
