"""`python -m manus_jax.serve` around the real vLLM, and what a pool does when such servers refuse,
come, go and die.

Two servers that ask for a key are shared by all tests, which end them one after the other.
"""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import requests

from manus_jax.config.server_settings import VllmSettings
from manus_jax.data.chat import train_tokenizer
from manus_jax.engines.protocol import EngineError, Request, Sampling
from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, init_params
from manus_jax.vllm.addresses import read_addresses, register
from manus_jax.vllm.client import VllmServer
from manus_jax.vllm.open_pool import open_vllm
from manus_jax.weights.shared_mirror import mirror_directory

PYTHON = os.environ.get("MANUS_JAX_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON, reason="MANUS_JAX_VLLM_PYTHON does not name an interpreter that has vLLM"
    ),
]
SHAPE = ("qwen2", 320, 128, 256)
ARCH = Architecture(*SHAPE, 2, 4, 2, 32, qkv_bias=True, max_positions=512)
DEEPER = Architecture(*SHAPE, 3, 4, 2, 32, qkv_bias=True, max_positions=512)
KEY = "s3cret"
RIGHT = {"Authorization": f"Bearer {KEY}"}


class Served:
    """A real server, in a process group of its own and with an address file of its own.

    It is started as documented, with the default type and the default size of the KV cache.
    """

    def __init__(self, root, name, model, **environment):
        self.addresses, self.log = root / f"addresses-{name}", root / f"log-{name}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "manus_jax.serve", "--model", str(model)]
        command += ["--port", str(port), "--max-length", "512"]
        command += ["--api-key-file", str(root / "key"), "--address-file", str(self.addresses)]
        command += ["--slots", "8"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def await_ready(self):
        said = next((line for line in self.process.stdout if line.startswith("serving ")), "")
        assert said == f"serving {self.url}\n", self.log.read_text()[-3000:]

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def card_of(arch, root):
    return huggingface.new_card(arch, root / "tokenizer")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    (root / "tokenizer").mkdir()
    train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 3, 300, root / "tokenizer")
    (root / "key").write_text(f"{KEY}\n")
    params = init_params(Transformer, ARCH, Compute(), 0)
    huggingface.save_hf(params, card_of(ARCH, root), root / "model")
    return root


@pytest.fixture(scope="module")
def servers(root):
    in_the_pause = {"MANUS_JAX_STAGE_WEIGHTS": "0"}
    servers = [Served(root, "a", root / "model"), Served(root, "b", root / "model", **in_the_pause)]
    for server in servers:
        server.await_ready()
    yield servers
    for server in servers:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="module")
def pool(root, servers):
    """Finds the first server in its file."""
    settings = VllmSettings(
        weights_dir=str(root / "weights"), address_file=str(servers[0].addresses), imbalance=0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        params = init_params(Transformer, ARCH, Compute(), 1)
        card = card_of(ARCH, root)
        pool = open_vllm(card, params, settings, slots=8, dtype="float32", max_length=512)
    yield pool
    pool.close()


def refused(root, server, arch):
    """What a run that has this server and no other says at once, for all its patience."""
    settings = VllmSettings(urls=(server.url,), weights_dir=str(root / "others"))
    params = init_params(Transformer, arch, Compute(), 0)
    with pytest.raises(EngineError) as refusal:
        open_vllm(card_of(arch, root), params, settings, slots=8, dtype="float32", max_length=512)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def ask(session, tokens=16):
    return Request(
        tuple(range(5, 25)), Sampling(max_tokens=tokens), sum(map(ord, session)), session
    )


def wait(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_asks_for_its_key_on_every_route_but_the_one_for_its_health(servers):
    url = servers[0].url
    asked = {"method": "fetched_weights", "kwargs": {}}
    for header in ({}, {"Authorization": "Bearer wrong"}):
        for path in ("/collective_rpc", "/pause", "/update_weights", "/abort_requests"):
            answer = requests.post(url + path, json=asked, headers=header, timeout=30)
            assert answer.status_code == 401, path
        for path in ("/v1/models", "/metrics", "/server_info"):
            assert requests.get(url + path, headers=header, timeout=30).status_code == 401, path
    assert requests.get(f"{url}/v1/models", headers=RIGHT, timeout=30).status_code == 200
    answer = requests.post(f"{url}/collective_rpc", json=asked, headers=RIGHT, timeout=30)
    assert answer.status_code == 200
    assert requests.get(f"{url}/health", timeout=30).status_code == 200


@pytest.mark.parametrize("key", ["wrong", None])
def test_the_error_for_a_wrong_or_missing_key_says_where_to_set_it(root, servers, monkeypatch, key):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    said = refused(root, servers[0], ARCH)
    assert f"{servers[0].url}/v1/models answered 401: this server needs its API key" in said
    assert said.endswith("give the key that it was started with in VLLM_API_KEY")


def test_a_server_of_another_model_is_refused_with_the_differences(root, servers, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    said = refused(root, servers[0], DEEPER)
    assert f"{servers[0].url} serves another model than the one that is trained" in said
    assert "num_layers is 2 and not 3" in said
    assert VllmServer(servers[0].url, api_key=KEY).weight_label() == "default"


def test_a_float32_model_is_served_in_float32_by_default(servers):
    client = VllmServer(servers[0].url, api_key=KEY)
    client.examine(1, False, None)
    assert client.dtype == "float32"


def test_a_server_that_comes_into_the_file_gets_the_weights_and_serves(servers, pool):
    first, second = servers
    assert read_addresses(first.addresses) == [first.url]
    assert pool.submit(ask("before")).result(120).versions == (0,) * 16
    register(first.addresses, second.url)
    wait(lambda: pool.metrics()["servers_ready"] == 2)
    labels = [VllmServer(server.url, api_key=KEY).weight_label() for server in servers]
    assert labels[0] == labels[1] != "default"
    for made in [pool.submit(ask(f"after {n}")) for n in range(6)]:
        assert made.result(120).versions == (0,) * 16
    numbers = pool.metrics()
    assert all(numbers[f"server/{s.url.removeprefix('http://')}/requests"] for s in servers)


def number_of(label):
    return int(label.partition("-")[0])


def test_weights_prepared_beside_a_server_are_those_that_it_would_load_in_the_pause(servers, pool):
    for version in (1, 2):
        pool.update_weights(init_params(Transformer, ARCH, Compute(), 10 + version), version)
        made, staged = [], []
        for server in servers:
            client = VllmServer(server.url, api_key=KEY)
            client.examine(1, False, None)
            made.append(client.generate(ask("the same"), f"same-{version}", number_of, None))
            staged.append(client._rpc("fetched_weights", {})["results"][0]["staged"])
        assert staged == [True, False]
        assert made[0].versions == (version,) * 16
        assert made[0] == made[1]
        mirror = mirror_directory(pool._publisher.root)
        assert len(list(mirror.glob("weights-*"))) == 1  # for both servers


def test_episodes_of_a_server_that_is_killed_are_finished_by_another(servers, pool):
    _, second = servers
    futures = [pool.submit(ask(f"episode {n}", tokens=450)) for n in range(6)]
    there = f"server/{second.url.removeprefix('http://')}/in_flight"
    wait(lambda: pool.metrics()[there] > 0)
    second.kill()
    for made in [future.result(300) for future in futures]:
        assert len(made.token_ids) == 450
        assert set(made.versions) == {pool.version}
    assert pool.metrics()["sessions_moved"] > 0
    assert pool.metrics()["servers_ready"] == 1


def test_a_server_that_ends_leaves_the_file_and_without_any_the_limit_is_an_error(
    servers, pool, caplog
):
    first, second = servers
    pool._settings = dataclasses.replace(pool._settings, patience=10.0)
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(60) == 143
    assert not mirror_directory(pool._publisher.root).exists()
    assert read_addresses(first.addresses) == [second.url]  # killed: it could not take itself out
    wait(lambda: pool.metrics()["servers"] == 1)
    with pytest.raises(EngineError, match=r"no vLLM server is in service after 10 s: .*does not"):
        pool.submit(ask("nobody")).result(120)
    assert "no vLLM server is in service: waiting up to 10 s for one" in caplog.text
    assert KEY not in first.log.read_text() + second.log.read_text()
