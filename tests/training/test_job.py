"""Jobs of several processes: connecting, sharing results, stopping."""

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
from manus_jax.data_proto import DataProto
from manus_jax.learner.learner import Reference
from manus_jax.learner.mesh import make_mesh
from manus_jax.training import job as job_module
from manus_jax.training.job import Job, cluster_found, connect
from manus_jax.training.stopping import StopRequest


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


def test_a_laptop_is_a_single_process_and_off_means_off(monkeypatch):
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert not connect(DistributedSettings())
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert not connect(DistributedSettings(mode="off"))


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match=r"process_id = 2 of distributed.processes = 2"):
        DistributedSettings(processes=2, process_id=2)
    with pytest.raises(ConfigError, match=r"mode is 'off', so distributed.coordinator and .*_id"):
        DistributedSettings(mode="off", coordinator="host:1234", process_id=0)
    with pytest.raises(ConfigError, match=r"distributed.heartbeat_s = 0.5 must be at least 1"):
        DistributedSettings(heartbeat_s=0.5)


def test_a_coordinator_without_an_address_is_named():
    with pytest.raises(ConfigError, match=r"distributed\.coordinator = 'nowhere\.invalid:1234': "):
        connect(DistributedSettings(coordinator="nowhere.invalid:1234", processes=2))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("SLURM_NTASKS", "two"), ("JAX_PROCESS_ID", "-1"), ("JAX_NUM_PROCESSES", "\u0662")],
)
def test_a_variable_of_the_scheduler_that_is_no_number_is_named(monkeypatch, variable, value):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1234" * ("JAX" in variable))
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"the environment variable {variable} = '{value}' is no"):
        connect(DistributedSettings())
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "nowhere.invalid:1234")
    with pytest.raises(ConfigError, match=r"'nowhere\.invalid:1234': "):
        connect(DistributedSettings())


def test_a_preemption_is_a_request_to_stop_with_143(monkeypatch):
    job = Job(1, 2)
    asked = []
    answers = iter([False, False, False, True])
    monkeypatch.setattr(job, "preempted", lambda: asked.append(1) or next(answers))
    request = StopRequest(job)
    assert [request.after_step() for _ in range(5)] == [False, False, False, True, True]
    assert len(asked) == 4
    assert request.exit_code == 128 + signal.SIGTERM == 143


def test_a_single_process_gets_its_own_result_and_its_own_error():
    job = Job()
    proto = DataProto.from_dict({"x": np.arange(2)})
    assert job.from_primary(lambda: proto) is proto
    assert job.on_primary(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        job.on_primary(lambda: 1 // 0)


@pytest.mark.parametrize("size", [0, 1, 1023, 4096, 4097, 10_000])
def test_a_message_is_sent_in_pieces_of_bounded_size(monkeypatch, size):
    sent = []
    monkeypatch.setattr(job_module, "_PIECE", 4096)
    monkeypatch.setattr(job_module, "barrier", lambda timeout_s: None)
    monkeypatch.setattr(
        job_module.multihost_utils, "broadcast_one_to_all", lambda x: sent.append(x) or x
    )
    proto = DataProto.from_dict({"x": np.resize(np.arange(256, dtype=np.uint8), size)})
    assert Job(0, 2).from_primary(lambda: proto) is proto
    (high, low), *pieces = sent
    data = proto.to_bytes()
    assert int(high) * 2**31 + int(low) == len(data) > size
    assert b"".join(piece.tobytes() for piece in pieces)[: len(data)] == data
    assert sum(len(piece) for piece in pieces) < len(data) + 4096 + 1024
    assert all(len(piece) <= 4096 for piece in pieces)


def test_a_message_may_have_more_bytes_than_an_int32(monkeypatch):
    pieces = []
    receive = lambda data, size: pieces.append(size) or (b"" if len(pieces) < 80 else message)
    message = DataProto.from_dict({"x": np.arange(2)}).to_bytes()
    monkeypatch.setattr(job_module, "barrier", lambda timeout_s: None)
    monkeypatch.setattr(job_module, "_broadcast_piece", receive)
    monkeypatch.setattr(  # what process 0 sent, as JAX's int32 numbers
        job_module.multihost_utils,
        "broadcast_one_to_all",
        lambda x: np.array(divmod(5 * 2**30, 2**31), np.int32),
    )
    received = Job(1, 2).from_primary(DataProto.empty)
    assert pieces == [1 << 26] * 80
    assert received.batch["x"].tolist() == [0, 1]


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


_SHARED = """
import sys, time
import numpy as np
from manus_jax.config.settings import DistributedSettings
from manus_jax.data_proto import DataProto
from manus_jax.errors import UserError, report_error
from manus_jax.training import job as job_module
from manus_jax.training.job import joined

def play():
    return DataProto.from_dict({"x": np.arange(5)}, {"uid": list("abcde")}, {"step": 3})

def fail():
    raise UserError("no server answers")

settings = DistributedSettings(
    coordinator=sys.argv[1], processes=2, process_id=int(sys.argv[2]), timeout_s=5
)
try:
    with joined(settings) as job:
        batch = job.from_primary(play)
        assert batch.batch["x"].tolist() == [0, 1, 2, 3, 4], batch
        assert batch.non_tensor_batch["uid"].tolist() == list("abcde")
        job_module._PIECE = 1024
        large = job.from_primary(lambda: DataProto.from_dict({"x": np.arange(1000)}))
        assert large.batch["x"].tolist() == list(range(1000))
        assert job.on_primary(lambda: "kept") == ("kept" if job.primary else None)
        if sys.argv[3] == "error":
            job.on_primary(fail)
        if sys.argv[3] == "stuck" and not job.primary:
            time.sleep(3600)
        job.on_primary(lambda: None)
except BaseException as error:
    sys.exit(report_error(error))
"""


def run_two(mode):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SHARED, address, str(number), mode],
            env={**os.environ, "XLA_FLAGS": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        if mode == "stuck":
            _, errors = processes[0].communicate(timeout=300)
            return [processes[0].returncode], [errors]
        errors = [process.communicate(timeout=300)[1] for process in processes]
        return [process.returncode for process in processes], errors
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_result_of_process_0_reaches_all():
    codes, errors = run_two("share")
    assert codes == [0, 0], errors


@pytest.mark.slow
def test_an_error_of_process_0_ends_all_with_its_message_and_code():
    codes, errors = run_two("error")
    assert codes == [2, 2], errors
    assert "error: no server answers" in errors[0]
    assert "error: process 0: no server answers" in errors[1]


@pytest.mark.slow
def test_a_process_that_is_stuck_ends_the_others_after_the_timeout():
    codes, errors = run_two("stuck")
    assert codes == [1]
    assert "process 0 waited 5 s (distributed.timeout_s) for the others" in errors[0]
