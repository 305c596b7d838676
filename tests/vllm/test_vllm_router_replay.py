"""The experts that a vLLM server returns with its generations are checked before they are used."""

import base64
import io

import numpy as np
import pytest
from vllm_loopback import LoopbackServer

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError, Request, Sampling
from manus_jax.models.architecture import Architecture
from manus_jax.vllm import open_pool
from manus_jax.vllm.client import BadAnswer, IncompatibleServer, VllmServer

MOE = Architecture("qwen3_moe", 64, 32, 48, 3, 4, 2, 8, num_experts=8, experts_per_token=2)
TOKENS = 3 + 4 - 1  # read, of a prompt of three and a generation of four


def encoded(experts):
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


EXPERTS = np.arange(TOKENS * 3 * 2).reshape(TOKENS, 3, 2).astype(np.uint8) % 8


@pytest.fixture
def server(tmp_path):
    server = LoopbackServer(tmp_path)
    server.returns_experts = True
    yield server
    server.close()


def client_of(server):
    return VllmServer(server.url, VllmSettings(urls=(server.url,), push=False, router_replay=True))


def generated(server, experts, known=0):
    server.label, server.backend = "3-a", None
    server.distort = lambda choice: choice.update(routed_experts=experts)
    client = client_of(server)
    client.examine(1, False, MOE)
    request = Request((5, 6, 7), Sampling(max_tokens=4), 5, "s", known)
    return client.generate(request, "id", {"3-a": 3}.get, 64)


def test_experts_come_with_a_generation_from_the_first_that_is_not_known(server):
    np.testing.assert_array_equal(generated(server, encoded(EXPERTS)).experts, EXPERTS)
    assert server.requests[-1]["sampling_params"]["routed_experts_prompt_start"] == 0
    np.testing.assert_array_equal(generated(server, encoded(EXPERTS[2:]), 2).experts, EXPERTS[2:])
    assert server.requests[-1]["sampling_params"]["routed_experts_prompt_start"] == 2


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "TypeError"),
        ("no base64!", "ValueError"),
        (base64.b64encode(b"no array").decode(), "ValueError"),
        (base64.b64encode(b"").decode(), "experts are not an array"),
        (encoded(EXPERTS[1:]), r"experts uint8 \(5, 3, 2\) of 6 tokens"),
        (encoded(EXPERTS[:, 1:]), r"\(6, 2, 2\) of 6 tokens"),
        (encoded(EXPERTS[..., :1]), r"\(6, 3, 1\) of 6 tokens"),
        (encoded(EXPERTS[..., 0]), r"\(6, 3\) of 6 tokens"),
        (encoded(EXPERTS.astype(np.float32)), "experts float32"),
        (encoded(EXPERTS + 1), r"experts 1\.\.8 of 8"),
    ],
)
def test_wrong_experts_are_a_failure_of_the_server(server, experts, message):
    with pytest.raises(BadAnswer, match=message):
        generated(server, experts)


def test_a_server_that_returns_no_experts_is_refused_with_what_to_do(server):
    server.returns_experts = False
    with pytest.raises(IncompatibleServer, match=r"-- --enable-return-routed-experts`$"):
        client_of(server).examine(1, False, MOE)


def test_servers_are_not_started_where_vllm_returns_no_experts(monkeypatch):
    monkeypatch.setattr(open_pool, "is_cpu_build", lambda python: True)
    settings = VllmSettings(servers=1, router_replay=True)
    with pytest.raises(EngineError, match="vLLM returns experts on GPUs only"):
        open_pool.open_vllm(None, None, settings, slots=1, dtype="float32", max_length=8)
