"""`python -m manus_jax.serve`: vLLM's arguments, access control, and the address file."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from free_ports import free_pair
from recording_python import HEALTHY, calls, recorder, snapshot

from manus_jax.models.architecture import ModelError
from manus_jax.vllm import access as vllm_access
from manus_jax.vllm import server_process
from manus_jax.vllm.access import AccessError, KeyedRoutes, check_host, read_api_key
from manus_jax.weights.manifest import WeightsError

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_vllm.sh"


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if k not in ("VLLM_API_KEY",)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **more}


def run(tmp_path, *arguments, **more):
    usual = {"--model": str(tmp_path), "--port": free_port()}
    given = [
        word for name, value in usual.items() if name not in arguments for word in (name, value)
    ]
    command = [sys.executable, "-m", "manus_jax.serve", *given, *arguments]
    return subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, timeout=60
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_server_begins_with_a_model_or_the_newest_snapshot(tmp_path):
    with pytest.raises(WeightsError, match="neither a Hugging Face directory"):
        server_process.model_directory(tmp_path, None)
    snapshot(tmp_path, 3)
    newest = snapshot(tmp_path, 12)
    (tmp_path / "00000013").mkdir()  # a version without one
    assert server_process.model_directory(tmp_path, 4096) == newest
    assert server_process.model_directory(newest, None) == newest


def test_a_cpu_build_is_recognised_and_takes_whole_prompts(tmp_path):
    assert server_process.is_cpu_build(str(recorder(tmp_path, build="cpu")))
    assert not server_process.is_cpu_build(str(recorder(tmp_path)))
    assert server_process.cpu_arguments(4096)[-2:] == ["--max-num-batched-tokens", "4096"]
    assert "--no-enable-chunked-prefill" in server_process.cpu_arguments(None)


def test_the_command_is_vllms_server_with_the_options_for_reinforcement_learning(tmp_path):
    model = snapshot(tmp_path)
    python = ("--python", str(recorder(tmp_path)))
    done = run(
        tmp_path,
        *python,
        "--max-length",
        "99",
        "--gpus",
        "4,5",
        "--",
        "--seed",
        "4",
    )
    assert done.returncode == 0, done.stderr
    ((called, given_environment),) = calls(tmp_path)
    assert called[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    given = dict(pairwise(called))
    assert given["--host"] == "127.0.0.1" and given["--max-model-len"] == "99"
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert json.loads(given["--weight-transfer-config"]) == {"backend": "manus_jax"}
    assert "--enable-scale-out" in called
    assert called[-2:] == ["--seed", "4"]
    assert given_environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert int(given_environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) >= 60
    assert given_environment["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_the_exit_code_is_vllms(tmp_path):
    snapshot(tmp_path)
    assert run(tmp_path, "--python", str(recorder(tmp_path, "sys.exit(7)"))).returncode == 7


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "8.8.8.8", "2001:4860:4860::8888", "no.such.invalid"]
)
def test_no_key_opens_an_interface_that_strangers_reach(host):
    with pytest.raises(AccessError, match="--host"):
        check_host(host, "key")


@pytest.mark.parametrize("host", ["10.0.0.7", "192.168.1.2", "100.64.0.9", "fd00::7"])
def test_a_private_interface_needs_a_key_and_loopback_none(host):
    with pytest.raises(AccessError, match=r"reached from outside: set VLLM_API_KEY"):
        check_host(host, None)
    check_host(host, "key")
    check_host("127.0.0.1", None)
    check_host("localhost", None)


def test_mistakes_of_the_command_are_one_line(tmp_path):
    model, python = ("--model", str(snapshot(tmp_path))), ("--python", str(recorder(tmp_path)))
    empty = tmp_path / "empty"
    empty.write_text("\n")
    (tmp_path / "key").write_text("k")
    key = ("--api-key-file", str(tmp_path / "key"))
    taken = socket.create_server(("127.0.0.1", 0))
    for arguments, words in [
        ((), "neither a Hugging Face directory"),
        ((*model, "--python", "no-such-python"), "is not an interpreter"),
        ((*model, *python, "--host", "0.0.0.0"), "every interface"),
        ((*model, *python, "--", "--api-key", "k"), "can be read by others"),
        ((*model, *python, "--", "--host=0.0.0.0"), "before the --"),
        ((*model, *python, "--max-length", "5000"), "exceeds the 4096 positions of the model"),
        ((*model, *python, "--port", str(taken.getsockname()[1])), "another program uses it"),
        ((*model, *python, "--host", "10.255.255.1", *key), "does not have the address"),
        ((*model, "--python", sys.executable), "has no vLLM: give the interpreter"),
        ((*model, *python, "--", "--tensor-paralel-size", "2"), "mean --tensor-parallel-size?"),
        ((*model, *python, "--", "--seed", "x"), "--seed 'x' is not a whole number from 0"),
        ((*model, *python, "--address-file", str(empty / "f")), "is not a directory"),
        ((*model, *python, "--gpus", "4;5"), "'4;5' is not a list of GPUs such as 4,5"),
        ((*model, *python, "--gpus", "4,4"), "names a GPU twice"),
        ((*model, *python, "--dtype", "float7"), "invalid choice: 'float7'"),
        ((*model, *python, "--api-key-file", str(tmp_path / "none")), "cannot be read"),
        ((*model, *python, "--api-key-file", str(empty)), "is empty"),
    ]:
        (tmp_path / "bare").mkdir(exist_ok=True)
        done = run(tmp_path / "bare", *arguments)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert words in done.stderr
    assert not calls(tmp_path)
    taken.close()


def test_models_that_vllm_cannot_load_are_refused(tmp_path):
    model = snapshot(tmp_path)
    (model / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match="contains no tokenizer"):
        server_process.model_directory(model, None)
    (model / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"contains no weights \(\*\.safetensors\)"):
        server_process.model_directory(model, None)
    for name in ("pytorch_model.bin", "model.gguf"):
        (model / name).touch()
        with pytest.raises(ModelError, match=rf"{name} is not in the safetensors format.*convert"):
            server_process.model_directory(model, None)
        (model / name).unlink()
    for text in ("{", "[]", "{}", "[" * 100_000):
        (model / "config.json").write_text(text)
        with pytest.raises(WeightsError, match=r"config\.json is not the config of a model"):
            server_process.model_directory(model, None)


_IMPOSTOR = HEALTHY.replace('given["--model"]', '"/another"')


@pytest.mark.parametrize(
    "then, message",
    [
        (HEALTHY.replace('"root"', '"other"'), "another program listens at"),
        (_IMPOSTOR, "another server listens at"),
    ],
)
def test_another_program_at_the_port_is_not_reported_as_serving(tmp_path, then, message):
    snapshot(tmp_path)
    python = ("--python", str(recorder(tmp_path, then)))
    done = run(tmp_path, *python)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_the_key_travels_in_the_environment_and_guards_every_route(tmp_path, monkeypatch):
    snapshot(tmp_path)
    (tmp_path / "key").write_text("from-a-file\n")
    python = ("--python", str(recorder(tmp_path)))
    done = run(tmp_path, *python, "--api-key-file", str(tmp_path / "key"), VLLM_API_KEY="other")
    assert done.returncode == 0
    ((called, given_environment),) = calls(tmp_path)
    assert given_environment["VLLM_API_KEY"] == "from-a-file"
    assert called[called.index("--middleware") + 1] == vllm_access.MIDDLEWARE
    assert "from-a-file" not in " ".join(called) + done.stdout + done.stderr
    monkeypatch.setenv("VLLM_API_KEY", "two words")
    with pytest.raises(AccessError, match="VLLM_API_KEY holds no valid API key"):
        read_api_key(None)


def statuses(path, authorization=None, kind="http"):
    """What a client is sent, through the guard and past it."""
    sent = []

    async def app(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message.get("status") or message.get("code"))

    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    asyncio.run(KeyedRoutes(app)({"type": kind, "path": path, "headers": headers}, None, send))
    return sent[0]


def test_only_the_sign_of_life_is_free(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    for path in ("/collective_rpc", "/update_weights", "/pause", "/v1/models", "/server_info"):
        assert statuses(path) == 401
        assert statuses(path, "Bearer wrong") == 401
        assert statuses(path, "Basic right") == 401
        assert statuses(path, "Bearer right") == 200
    assert statuses("/health") == 200
    assert statuses("/v1/realtime", kind="websocket") == 1008
    assert statuses("", kind="lifespan") == 200
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(AccessError, match="is not set"):
        KeyedRoutes(None)


@contextlib.contextmanager
def serving(tmp_path, *arguments):
    """A server that answers, from when it says so to the block's end."""
    command = [sys.executable, "-m", "manus_jax.serve", "--model", str(tmp_path), *arguments]
    command += ["--python", str(recorder(tmp_path, HEALTHY))]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait()


def test_a_server_is_in_the_address_file_from_ready_to_end(tmp_path):
    snapshot(tmp_path)
    addresses = tmp_path / "addresses"
    addresses.write_text("http://10.0.0.1:8000\n")
    port = free_port()
    with serving(tmp_path, "--port", port, "--address-file", str(addresses)) as (process, said):
        url = f"http://127.0.0.1:{port}"
        assert said == f"serving {url}\n"
        assert addresses.read_text().split() == ["http://10.0.0.1:8000", url]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert addresses.read_text().split() == ["http://10.0.0.1:8000"]


def test_a_server_that_dies_leaves_the_address_file(tmp_path):
    snapshot(tmp_path)
    addresses, port = tmp_path / "addresses", free_port()
    with serving(tmp_path, "--port", port, "--address-file", str(addresses)) as (process, _):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert process.wait(30) != 0
    assert addresses.read_text() == ""


def start_script(tmp_path, *arguments, **more):
    snapshot(tmp_path)
    python = recorder(tmp_path, "import time; time.sleep(0.5)")
    return subprocess.run(
        [str(SCRIPT), str(tmp_path), *arguments],
        env=environment(MANUS_JAX_VLLM_PYTHON=str(python), **more),
        capture_output=True,
        text=True,
        timeout=60,
    )


def until(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_the_script_starts_servers_one_port_after_the_other(tmp_path):
    done = start_script(tmp_path, "2", "8100", "--", "--max-length", "99", "--", "--seed", "4")
    assert done.returncode == 0, done.stderr
    for number, (called, _) in enumerate(calls(tmp_path)):
        given = dict(pairwise(called))
        assert given["--port"] == str(8100 + number) and given["--max-model-len"] == "99"
        assert called[-2:] == ["--seed", "4"]


def test_the_script_needs_only_the_environment_of_vllm(tmp_path):
    """It runs in any directory, with vLLM's interpreter, which finds this project."""
    python = recorder(tmp_path)
    given = environment(MANUS_JAX_VLLM_PYTHON=str(python))
    del given["PYTHON"]
    command = [str(SCRIPT), str(tmp_path), "1", "8100"]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((called, seen),) = calls(tmp_path)
    assert called[:4] == ["-m", "manus_jax.serve", "--model", str(tmp_path)]
    assert seen["PYTHONPATH"].split(os.pathsep)[0] == str(SCRIPT.parents[1])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the first argument must be the directory of a model"),
        (["--port", "8000"], "the first argument must be the directory of a model"),
        (["DIR", "none"], "'none' is not a number from 1 to 99999"),
        (["DIR", "2", "65535"], "ports from 65535 on exceed 65535"),
        (["DIR", "1", "8000", "--slots"], "unexpected '--slots': options go after --"),
    ],
)
def test_wrong_arguments_of_the_script_are_one_line(arguments, message):
    done = subprocess.run([str(SCRIPT), *arguments], env=environment(), capture_output=True)
    assert done.returncode == 2 and message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1 and not done.stdout


def test_the_script_refuses_an_interpreter_that_does_not_exist(tmp_path):
    done = start_script(tmp_path, PYTHON="no-such-python")
    assert done.returncode == 2 and "no interpreter 'no-such-python'" in done.stderr


def test_the_script_gives_every_server_its_group_of_gpus(tmp_path):
    snapshot(tmp_path)
    python = recorder(tmp_path, HEALTHY)
    process = subprocess.Popen(
        [str(SCRIPT), str(tmp_path), "2", str(free_pair())],
        env=environment(
            MANUS_JAX_VLLM_PYTHON=str(python), CUDA_VISIBLE_DEVICES="2,3,6,7", TENSOR_PARALLEL="2"
        ),
    )
    try:
        until(lambda: len(calls(tmp_path)) == 2)
    finally:
        process.terminate()
        assert process.wait(30) == 143
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in calls(tmp_path)] == ["2,3", "6,7"]
    for called, _ in calls(tmp_path):
        assert called[called.index("--tensor-parallel-size") + 1] == "2"


def test_the_script_refuses_more_than_there_is(tmp_path):
    done = start_script(tmp_path, "2", CUDA_VISIBLE_DEVICES="0,1,2", TENSOR_PARALLEL="2")
    assert done.returncode == 2
    assert "2 servers x TENSOR_PARALLEL 2 = 4 GPUs, and there are 3: 0,1,2" in done.stderr
