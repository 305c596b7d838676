"""Settings of vLLM servers and of those that the program starts: errors are found early."""

import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pytest
from published_models import CARD, model
from recording_python import HEALTHY, calls, recorder, snapshot

from manus_jax.config.binding import ConfigError
from manus_jax.config.server_settings import VllmSettings
from manus_jax.config.vllm_options import check_options
from manus_jax.servers.processes import ServerSetupError, answers
from manus_jax.vllm.open_pool import open_vllm, supervise


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "either vllm.urls"),
        ({"urls": ["http://a"], "servers": 1}, "either vllm.urls"),
        ({"urls": ["http://a"], "address_file": "a"}, "either vllm.urls"),
        ({"address_file": "a", "gpus": 1}, "either vllm.urls"),
        ({"urls": ["http://a"]}, "vllm.urls is set and vllm.weights_dir is not"),
        ({"address_file": "a"}, "vllm.address_file is set and vllm.weights_dir is not"),
        ({"servers": 1, "push": False}, "is for servers that run elsewhere"),
        ({"servers": 1, "attempts": "2"}, "vllm.attempts = '2' is not a whole number"),
        ({"servers": 1, "patience": 0}, "vllm.patience = 0.0 must be at least 0.001"),
        ({"servers": 1, "snapshot_every": 0}, "vllm.snapshot_every = 0 must be at least 1"),
        ({"gpus": 0}, "gpus = 0: at least 1"),
        ({"gpus": [1, 1]}, "names one twice: 1, 1"),
        (
            {"gpus": 4, "servers": 3},
            "gives vLLM 4 GPUs, and 3 servers x tensor_parallel 1 need 3",
        ),
        ({"gpus": 5, "tensor_parallel": 2}, "5 GPUs are not divisible by tensor_parallel = 2"),
        (
            {"servers": 1, "gpu_memory_utilization": 0.5},
            "gpu_memory_utilization is set and vllm.gpus is not",
        ),
        (
            {"gpus": 1, "learner_memory_fraction": 1.5},
            "_fraction = 1.5 must be at most 1",
        ),
        ({"servers": -1}, "vllm.servers = -1 must be at least 0"),
        ({"address_file": "a", "weights_dir": "b", "tensor_parallel": 2}, "started here"),
        (
            {"servers": 1, "server_arguments": ["--tensor_paralel_size=2"]},
            r"vllm.server_arguments: .*; did you mean --tensor-parallel-size\?",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        VllmSettings(**options)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--seed", "--seed needs a value"),
        ("--seed --enforce-eager", "--seed needs a value"),
        ("--seed -1", "--seed '-1' is not a whole number from 0 to"),
        ("--seed=1e400", "is not a whole number"),
        ("--gpu-memory-utilization nan", "'nan' is not a number from 0.001 to 1"),
        ("--gpu-memory-utilization 0", "'0' is not a number"),
        ("--enforce-eager=1", "--enforce-eager takes no value"),
        ("--compilation-config 3", "'3' is not a JSON object"),
        ("--scheduling-policy best", "'best' is not one of fcfs, priority"),
        ("--kv-cache-dtype ../x", "is not a name"),
        ("policy", "'policy' is not an option of vLLM"),
        ("-tp 2", "'-tp' is not an option of vLLM"),
        ("--hos 0.0.0.0", "--hos is not an option of vLLM"),
        ("--port 80", "--port goes before the --"),
        ("--max_model_len=5", "--max-length goes before the --"),
        ("--logprobs-mode raw_logprobs", "is set by manus_jax.serve"),
        ("--api_key=k", "can be read by others"),
        ("--worker-cls evil", "--worker-cls is not an option of vLLM that a server may be given"),
        ("--config x.yaml", "--config is not an option"),
    ],
)
def test_unknown_options_of_vllm_and_wrong_values_are_refused(words, message):
    with pytest.raises(ConfigError, match=f"^here: .*{message}"):
        check_options(words.split(), "here")


def test_known_options_of_vllm_are_passed_on():
    given = "--seed 4 --enforce-eager --no-enable-chunked-prefill --max_num_batched_tokens=2048 "
    given += "--gpu-memory-utilization 0.85 --compilation-config {} --kv-cache-dtype fp8"
    check_options(given.split(), "here")


def test_servers_elsewhere_may_keep_their_weights():
    assert VllmSettings(urls=["http://a"], push=False).urls == ("http://a",)


def supervised(tmp_path, slots=4, dtype="float32", **options):
    logs = tmp_path / "logs"
    return supervise(VllmSettings(**options), tmp_path, slots, dtype, 64, logs, "a-random-key")


@pytest.mark.slow
def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log(tmp_path):
    python = recorder(tmp_path, "sys.exit('no vllm here')")
    snapshot(tmp_path)
    written = r"the vLLM server ended with status 1; it wrote:\n(.*\n)*no vllm here\n\(all output: "
    with pytest.raises(ServerSetupError, match=written):
        supervised(tmp_path, servers=1, python=str(python)).start()
    (log,) = (tmp_path / "logs").iterdir()
    assert "no vllm here" in log.read_text()


@pytest.mark.slow
def test_the_log_of_a_server_that_does_not_start_is_kept_and_named(tmp_path, monkeypatch):
    python = recorder(tmp_path, build="cpu")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    settings = VllmSettings(servers=1, python=str(python))
    with pytest.raises(ServerSetupError) as error:
        open_vllm(CARD, model(), settings, slots=4, dtype="float32", max_length=64)
    named = re.search(r"\(all output: (.*)\)", str(error.value))[1]
    assert "contains no tokenizer" in Path(named).read_text()
    assert [path.name for path in (tmp_path / "scratch").glob("manus-jax-vllm-*")] == [
        Path(named).parent.name
    ]


@pytest.mark.slow
def test_servers_are_started_again_when_they_die_and_end_with_the_program(tmp_path):
    snapshot(tmp_path)
    python = str(recorder(tmp_path, HEALTHY))
    servers = supervised(tmp_path, gpus=("4", "5"), python=python)
    assert len(set(servers.start())) == 2
    before = servers.pids()
    subprocess.run(["kill", "-9", str(before[0])], check=True)
    for _ in range(1000):
        if len(servers.pids()) == 2 and servers.pids()[0] != before[0]:
            break
        time.sleep(0.01)
    after = servers.pids()
    assert after[0] != before[0] and after[1] == before[1]
    servers.stop()
    for pid in {*before, *after}:
        assert subprocess.run(["kill", "-0", str(pid)], capture_output=True).returncode != 0
    assert {env["CUDA_VISIBLE_DEVICES"] for _, env in calls(tmp_path)} == {"4", "5"}


_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HEALTHY
_TRAINER = """
import sys, time
from pathlib import Path
from manus_jax.config.server_settings import VllmSettings
from manus_jax.vllm.open_pool import open_vllm, supervise
root = Path(sys.argv[1])
settings = VllmSettings(servers=1, python=sys.argv[2])
servers = supervise(settings, root, 4, "float32", 64, root / "logs", "a-random-key")
print(servers.start()[0], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_hanging_server_is_killed_with_its_trainer(tmp_path):
    snapshot(tmp_path)
    python = recorder(tmp_path, _STUBBORN)
    command = [sys.executable, "-c", _TRAINER, str(tmp_path), str(python)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = trainer.stdout.readline().strip()
    assert answers(f"{url}/health")
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 60
    while answers(f"{url}/health"):
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
        "server_arguments": ["--seed", "4"],
    }
    started = supervised(tmp_path, 33, "bfloat16", **options)
    started.start()
    started.stop()
    made = calls(tmp_path)
    assert sorted(env["CUDA_VISIBLE_DEVICES"] for _, env in made) == ["4,5", "6,7"]
    for arguments, env in made:
        given = dict(pairwise(arguments))
        assert given["--tensor-parallel-size"] == "2"
        assert given["--gpu-memory-utilization"] == "0.85"
        assert given["--max-num-seqs"] == "17"  # half of 33, and one of them more
        assert arguments[-2:] == ["--seed", "4"]
        assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert env["VLLM_API_KEY"] == "a-random-key" not in arguments
        assert given["--middleware"] == "manus_jax.vllm.access.KeyedRoutes"


@pytest.mark.slow
def test_servers_without_gpus_share_the_cores_and_are_bound_to_none(tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    snapshot(tmp_path)
    options = {"servers": 2, "python": str(recorder(tmp_path, HEALTHY))}
    started = supervised(tmp_path, 8, **options)
    started.start()
    started.stop()
    for _, env in calls(tmp_path):
        assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert env["OMP_NUM_THREADS"] == "3"  # half of eight, less the one for the scheduler
