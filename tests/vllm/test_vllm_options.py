"""Settings of vLLM servers, and those that the program starts: mistakes are found before."""

import subprocess
import sys
import time
from itertools import pairwise

import pytest
from recording_python import HEALTHY, calls, recorder, snapshot

from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import EngineSettings
from manus_jax.engines.protocol import EngineError
from manus_jax.training.build_rollout import check_engine
from manus_jax.vllm.managed_servers import ManagedServers, ServerRecipe, answers
from manus_jax.vllm.options import _start, parse_options


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "either urls"),
        ({"urls": ["http://a"], "servers": 1}, "either urls"),
        ({"urls": ["http://a"], "address_file": "a"}, "either urls"),
        ({"address_file": "a", "gpus": 1}, "either urls"),
        ({"urls": ["http://a"]}, "has urls and no weights_dir"),
        ({"address_file": "a"}, "has address_file and no weights_dir"),
        ({"servers": 1, "push": False}, "need push"),
        ({"servers": 1, "atempts": 2}, "did you mean attempts"),
        ({"gpus": 0}, "gpus = 0; at least 1"),
        ({"gpus": [1, 1]}, "names one twice: 1, 1"),
        (
            {"gpus": 4, "servers": 3},
            "3 servers x tensor_parallel 1 = 3 GPUs, and gpus gives them 4",
        ),
        ({"gpus": 5, "tensor_parallel": 2}, "5 GPUs are not divisible by tensor_parallel = 2"),
        ({"servers": 1, "gpu_memory_utilization": 0.5}, "goes with gpus"),
        ({"gpus": 1, "learner_memory_fraction": 1.5}, "1.5 must be above 0 and at most 1"),
        ({"servers": -1}, "numbers of things"),
        ({"address_file": "a", "weights_dir": "b", "tensor_parallel": 2}, "started here"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(EngineError, match=message):
        parse_options(options)
    with pytest.raises(ConfigError, match=message):
        check_engine(EngineSettings(name="vllm", options=options))


def test_servers_elsewhere_may_keep_their_weights():
    assert parse_options({"urls": ["http://a"], "push": False}).urls == ("http://a",)


def recipe(tmp_path, python):
    snapshot(tmp_path)
    return ServerRecipe(str(python), tmp_path, 64, 4, "float32")


@pytest.mark.slow
def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path):
    python = recorder(tmp_path, "sys.exit('no vllm here')")
    with pytest.raises(EngineError, match=r"ended with status 1: no vllm here \(all of it in"):
        ManagedServers(recipe(tmp_path, python), [()], tmp_path / "logs")


@pytest.mark.slow
def test_servers_are_started_again_when_they_die_and_end_with_the_program(tmp_path):
    servers = ManagedServers(
        recipe(tmp_path, recorder(tmp_path, HEALTHY)), [("4",), ("5",)], tmp_path / "logs"
    )
    before = servers.pids
    assert len(set(servers.urls)) == 2
    subprocess.run(["kill", "-9", str(before[0])], check=True)
    for _ in range(1000):
        if len(servers.pids) == 2 and servers.pids[0] != before[0]:
            break
        time.sleep(0.01)
    after = servers.pids
    assert after[0] != before[0] and after[1] == before[1]
    servers.close()
    for pid in {*before, *after}:
        assert subprocess.run(["kill", "-0", str(pid)], capture_output=True).returncode != 0
    assert {env["CUDA_VISIBLE_DEVICES"] for _, env in calls(tmp_path)} == {"4", "5"}


_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HEALTHY
_TRAINER = """
import sys, time
from pathlib import Path
from manus_jax.vllm.managed_servers import ManagedServers, ServerRecipe
root = Path(sys.argv[1])
servers = ManagedServers(ServerRecipe(sys.argv[2], root, 64, 4, "float32"), [()], root / "logs")
print(servers.urls[0], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_server_that_will_not_end_goes_all_the_same_when_its_trainer_is_killed(tmp_path):
    snapshot(tmp_path)
    python = recorder(tmp_path, _STUBBORN)
    command = [sys.executable, "-c", _TRAINER, str(tmp_path), str(python)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = trainer.stdout.readline().strip()
    assert answers(url)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 60
    while answers(url):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_every_server_that_is_started_sees_its_own_group_of_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the learner's, by now
    monkeypatch.setenv("VLLM_API_KEY", "for-servers-elsewhere")
    snapshot(tmp_path)
    options = {
        "gpus": ["4", "5", "6", "7"],
        "tensor_parallel": 2,
        "gpu_memory_utilization": 0.85,
        "python": str(recorder(tmp_path, HEALTHY)),
        "vllm_arguments": ["--seed", "4"],
    }
    started = _start(parse_options(options), tmp_path, 33, "bfloat16", 64, tmp_path / "logs")
    started.close()
    made = calls(tmp_path)
    assert sorted(env["CUDA_VISIBLE_DEVICES"] for _, env in made) == ["4,5", "6,7"]
    for arguments, env in made:
        given = dict(pairwise(arguments))
        assert given["--tensor-parallel-size"] == "2"
        assert given["--gpu-memory-utilization"] == "0.85"
        assert given["--max-num-seqs"] == "17"  # half of 33, and one of them more
        assert arguments[-2:] == ["--seed", "4"]
        assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert "VLLM_API_KEY" not in env and "--middleware" not in arguments


@pytest.mark.slow
def test_servers_without_gpus_share_the_cores_and_are_bound_to_none(tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    snapshot(tmp_path)
    options = {"servers": 2, "python": str(recorder(tmp_path, HEALTHY))}
    started = _start(parse_options(options), tmp_path, 8, "float32", 64, tmp_path / "logs")
    started.close()
    for _, env in calls(tmp_path):
        assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert env["OMP_NUM_THREADS"] == "3"  # half of eight, less the one for the scheduler
