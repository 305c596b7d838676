"""`python -m manus_jax.serve` around the real vLLM: its key guards what vLLM leaves open."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import requests

from manus_jax.chat import train_tokenizer
from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, init_params
from manus_jax.rollout.vllm_addresses import read_addresses

PYTHON = os.environ.get("MANUS_JAX_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON, reason="MANUS_JAX_VLLM_PYTHON does not name an interpreter that has vLLM"
    ),
]
ARCH = Architecture("qwen2", 320, 128, 256, 2, 4, 2, 32, qkv_bias=True, max_positions=512)


def write_model(directory):
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir()
    train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 3, 300, tokenizer)
    card = huggingface.new_card(ARCH, tokenizer)
    huggingface.save_hf(init_params(Transformer, ARCH, Compute(), 0), card, directory / "model")
    return directory / "model"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_real_server_asks_for_its_key_and_is_listed_while_it_serves(tmp_path):
    addresses, port = tmp_path / "addresses", free_port()
    (tmp_path / "key").write_text("s3cret\n")
    command = [sys.executable, "-m", "manus_jax.serve", "--model", str(write_model(tmp_path))]
    command += ["--port", str(port), "--max-length", "128", "--dtype", "float32"]
    command += ["--api-key-file", str(tmp_path / "key"), "--address-file", str(addresses)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            said = next((line for line in process.stdout if line.startswith("serving ")), "")
            assert said == f"serving {url}\n", (tmp_path / "log").read_text()[-3000:]
            assert read_addresses(addresses) == [url]
            asked = {"method": "fetched_weights", "kwargs": {}}
            for header, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401)):
                for path in ("/collective_rpc", "/pause", "/update_weights", "/abort_requests"):
                    answer = requests.post(url + path, json=asked, headers=header, timeout=30)
                    assert answer.status_code == status, path
                assert (
                    requests.get(f"{url}/v1/models", headers=header, timeout=30).status_code == 401
                )
            right = {"Authorization": "Bearer s3cret"}
            assert requests.get(f"{url}/v1/models", headers=right, timeout=30).status_code == 200
            answer = requests.post(f"{url}/collective_rpc", json=asked, headers=right, timeout=30)
            assert answer.status_code == 200
            assert requests.get(f"{url}/health", timeout=30).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()
            process.wait()
    assert read_addresses(addresses) == []
    assert "s3cret" not in (tmp_path / "log").read_text()
