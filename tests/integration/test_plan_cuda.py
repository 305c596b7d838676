"""Plans for GPUs, compiled by JAX's CUDA plug-in; no GPU is needed.

The plug-in is in a folder of its own, `MANUS_JAX_CUDA_PLUGIN`, because JAX would otherwise look
for GPUs in every test.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planned_runs import arguments, write_tiny

ROOT = Path(__file__).parents[2]
PLUGIN = os.environ.get("MANUS_JAX_CUDA_PLUGIN")
pytestmark = pytest.mark.skipif(not PLUGIN, reason="MANUS_JAX_CUDA_PLUGIN is not set")


def run(*command):
    environment = {**os.environ, "PYTHONPATH": str(PLUGIN), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_small_plan_for_gpus_is_compiled_with_triton(tmp_path):
    args = arguments("cuda:2x4x80GB", write_tiny(tmp_path), "mesh.data = 2")
    out = tmp_path / "plan.json"
    printed = run("-m", "manus_jax.plan", *args, "--json", str(out))
    made = json.loads(out.read_text())
    (update,) = made["updates"]
    assert (made["chips"], update["source"], update["kernels"]) == (8, "compiled", ["triton"])
    assert update["memory"]["temporaries"] > 0
    sent = {(c["kind"], c["chips"]) for c in update["collectives"]}
    assert {("all-gather", 4), ("all-reduce", 2)} <= sent
    assert "policy update, per chip (compiled)" in printed


def test_machines_are_processes():
    code = (
        "from manus_jax.planning.topologies import find_topology\n"
        "print(*(d.process_index for d in find_topology('cuda:2x4xA100').devices))"
    )
    assert run("-c", code).split() == ["0"] * 4 + ["1"] * 4
