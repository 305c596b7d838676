"""Plans for GPUs, compiled by JAX's CUDA plug-in; no GPU is needed.

The plug-in is installed like the other compilers (`.[plan]`) or in a folder of its own, which
`MANUS_JAX_CUDA_PLUGIN` names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planned_runs import arguments, write_tiny

from manus_jax.planning.chips import GPUS
from manus_jax.planning.topologies import has_cuda_compiler

ROOT = Path(__file__).parents[2]
PLUGIN = os.environ.get("MANUS_JAX_CUDA_PLUGIN", "")
pytestmark = pytest.mark.skipif(
    not PLUGIN and not has_cuda_compiler(), reason="JAX's CUDA plug-in is not installed"
)


def run(*command, **variables):
    environment = {**os.environ, "PYTHONPATH": PLUGIN, "XLA_FLAGS": "", **variables}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_a_small_step_for_gpus_is_compiled_with_triton(tmp_path):
    options = ("mesh.data = 2", "compute.remat = 'offload'", "optimizer.state = 'host'")
    args = arguments("cuda:2x4x80GB", write_tiny(tmp_path), *options)
    out = tmp_path / "plan.json"
    printed = run("-m", "manus_jax.plan", *args, "--json", str(out)).stdout
    made = json.loads(out.read_text())
    (update,) = made["updates"]
    assert (made["chips"], update["source"], update["kernels"]) == (8, "compiled", ["triton"])
    sent = {(c["kind"], c["chips"]) for c in update["collectives"]}
    assert {("all-gather", 4), ("all-reduce", 2)} <= sent
    assert "policy update, per chip (compiled)" in printed

    own = {p["name"]: p["own"] for p in made["programs"]}
    forward = own["old log-probs"]
    assert own["reference log-probs"] == forward and "gathering of weights" in own
    memory = update["memory"]
    assert memory["parameters"] < forward < own["policy update"]
    assert memory["optimizer"] > memory["parameters"] and memory["optimizer_on_host"] == 0
    assert "cannot place arrays in host memory" in " ".join(printed.split())
    # Compilers have buffers of fixed size, which matter in a program of a few MB.
    assert 0.5 < memory["temporaries"] / memory["estimated_temporaries"] < 2


def test_all_kinds_of_gpus_are_known_to_the_compiler_and_machines_are_processes():
    code = (
        "from manus_jax.planning.chips import GPUS\n"
        "from manus_jax.planning.topologies import find_topology\n"
        "for name in GPUS:\n"
        "    topology = find_topology(f'cuda:2x2x{name}')\n"
        "    print(name, *(d.process_index for d in topology.devices), topology.compiles)"
    )
    assert run("-c", code).stdout.splitlines() == [f"{name} 0 0 1 1 True" for name in GPUS]


def test_the_plug_in_is_silent_in_commands_on_machines_without_accelerators(tmp_path):
    code = (
        "import jax\n"
        "from pathlib import Path\n"
        "from manus_jax.accelerators import prepare_accelerators\n"
        "prepare_accelerators(Path({!r}))\n"
        "print(jax.devices()[0].platform)"
    )
    quiet = run("-c", code.format(str(tmp_path)), JAX_PLATFORMS="")
    assert (quiet.stdout, quiet.stderr) == ("cpu\n", "")
