"""What a job of several processes is made of: finding others, noticing a death, being stopped."""

import os
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import DistributedSettings
from manus_jax.learner.learner import Reference
from manus_jax.learner.mesh import make_mesh
from manus_jax.training.distributed import Heartbeats, cluster_found, connect
from manus_jax.training.stopping import StopRequest
from manus_jax.weights.host_tensors import spread


@pytest.mark.parametrize(
    ("environment", "tpu", "found"),
    [
        ({}, False, None),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, False, "JAX_COORDINATOR_ADDRESS"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}, False, "SLURM_NTASKS"),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, False, None),
        ({"SLURM_NTASKS": "4"}, False, None),  # in the batch script, outside of srun
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False, "OMPI_COMM_WORLD_SIZE"),
        ({}, True, "TPU"),
        ({"JAX_PLATFORMS": "cpu"}, True, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False, None),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"},
            False,
            "JOB_COMPLETION_INDEX",
        ),
    ],
)
def test_a_cluster_is_found_where_there_is_one(environment, tpu, found):
    assert cluster_found(environment, tpu) == found


def test_a_laptop_is_alone_and_off_means_off(monkeypatch):
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert not connect(DistributedSettings())
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert not connect(DistributedSettings(mode="off"))


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"process_id = 2 of distributed.processes = 2"):
        DistributedSettings(processes=2, process_id=2)
    with pytest.raises(ConfigError, match=r"distributed.heartbeat_s = 0.5 must be at least 1"):
        DistributedSettings(heartbeat_s=0.5)


def test_a_process_whose_heart_stands_still_for_the_limit_is_silent():
    heartbeats = Heartbeats(range(3), 10.0, now=0.0)
    assert heartbeats.silent({0: "a", 1: "a", 2: "a"}, now=4.0) == []
    assert heartbeats.silent({0: "b", 1: "a", 2: "b"}, now=13.0) == []
    assert heartbeats.silent({0: "c", 1: "a", 2: "c"}, now=14.5) == [1]
    assert heartbeats.silent({0: "d", 1: "b", 2: "d"}, now=15.0) == []  # it was only slow


def test_a_process_that_never_showed_itself_is_silent():
    assert Heartbeats(range(2), 5.0, now=0.0).silent({0: "a"}, now=6.0) == [1]


def test_a_preemption_is_a_request_to_stop_with_143():
    asked = []
    request = StopRequest(lambda step: asked.append(step) or step == 3)
    assert [request.after(step) for step in (0, 1, 2, 3, 4)] == [False, False, False, True, True]
    assert asked == [0, 1, 2, 3]
    assert request.exit_code == 128 + signal.SIGTERM == 143


def test_a_reference_on_the_host_keeps_each_slice_once_and_gives_back_the_same_array():
    mesh = make_mesh(data=2, fsdp=4)
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    array = jax.device_put(np.arange(32, dtype=np.float32).reshape(4, 8), sharding)
    reference = Reference({"w": array}, on_host=True)
    kept = reference._kept["w"]._slices
    assert sum(piece.size for piece in kept.values()) == 32  # not once per data replica
    back = reference.params()["w"]
    assert back.sharding == sharding
    np.testing.assert_array_equal(back, array)


def test_spread_tensors_are_read_together_a_layer_at_a_time():
    mesh = make_mesh(fsdp=8)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    stack = np.arange(3 * 8 * 2, dtype=np.float32).reshape(3, 8, 2)
    table = np.arange(16, dtype=np.float32).reshape(8, 2)
    params = {
        "backbone": {
            "layers": {"q_proj": place(stack, PartitionSpec(None, "fsdp"))},
            "embed": place(table, PartitionSpec("fsdp")),
        }
    }
    told = []

    class Together:
        def __init__(self, **command):
            told.append((command["path"][-1], command["layer"], command["dtype"]))

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    tensors = spread(params, Together)
    assert not told
    whole = jax.tree.map(np.asarray, tensors)
    np.testing.assert_array_equal(whole["backbone"]["layers"]["q_proj"], stack)
    np.testing.assert_array_equal(whole["backbone"]["embed"], table)
    expected = [("q_proj", layer, "float32") for layer in range(3)] + [("embed", None, "float32")]
    assert sorted(told, key=str) == sorted(expected, key=str)
    np.testing.assert_array_equal(tensors["backbone"]["layers"]["q_proj"][1], stack[1])


_STUCK = """
import sys, time
from manus_jax.training.distributed import joined
from manus_jax.config.settings import DistributedSettings

settings = DistributedSettings(
    coordinator=sys.argv[1], processes=2, process_id=int(sys.argv[2]), together_s=5
)
with joined(settings, ()) as team:
    if team.leads:
        with team.together(do="think"):
            time.sleep(3600)
    for command in team.commands():
        time.sleep(3600)
"""


def test_processes_that_live_and_do_not_come_to_an_end_are_ended():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _STUCK, address, str(number)],
            env={**os.environ, "XLA_FLAGS": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 1
        assert "'think' has taken more than 5 s" in errors.strip().splitlines()[-1]
