"""Plans for GPUs, compiled by JAX's CUDA plug-in; no GPU is needed."""

import pytest
from planned_runs import arguments, planned, write_tiny

from manus_jax.planning.topologies import find_topology, has_cuda_compiler

pytestmark = pytest.mark.skipif(
    not has_cuda_compiler(), reason="JAX's CUDA plug-in is not installed"
)


def test_a_small_plan_for_gpus_is_compiled_with_triton(tmp_path, capsys):
    made = planned(tmp_path, *arguments("cuda:2x4x80GB", write_tiny(tmp_path), "mesh.data = 2"))
    (update,) = made["updates"]
    assert (made["chips"], update["source"], update["kernels"]) == (8, "compiled", ["triton"])
    assert update["memory"]["temporaries"] > 0
    sent = {(c["kind"], c["chips"]) for c in update["collectives"]}
    assert {("all-gather", 4), ("all-reduce", 2)} <= sent
    assert "policy update, per chip (compiled)" in capsys.readouterr().out


def test_machines_are_processes():
    devices = find_topology("cuda:2x4xA100").devices
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4
