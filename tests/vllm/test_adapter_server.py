"""Versions that are adapters: loading, unloading, and servers that are refused."""

import contextlib
import dataclasses

import pytest
from published_models import ARCH, CARD
from test_vllm_pool import SETTINGS, ask, opened, wait_until
from vllm_loopback import LoopbackServer

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError
from manus_jax.models.adapter_files import Adaptation, AdapterWeights, fingerprint_of_tensors
from manus_jax.models.lora import Lora
from manus_jax.models.transformer import Transformer, init_adapters
from manus_jax.vllm.open_pool import check_servers
from manus_jax.weights.adapters import AdapterPublisher

LORA = Lora(4, 8.0, ("q_proj", "down_proj"))
CHECKSUMS = {"model.norm.weight": 7}


@pytest.fixture
def server(tmp_path):
    server = LoopbackServer(tmp_path / "server")
    server.max_lora_rank, server.checksums = 8, CHECKSUMS
    yield server
    server.close()


class Run:
    """A pool, and what it is given."""

    def __init__(self, server, root):
        base = fingerprint_of_tensors(CHECKSUMS, ARCH)
        adapters = init_adapters(Transformer, ARCH, LORA, 0)
        self.weights = AdapterWeights(adapters, Adaptation(LORA, "/base", base), root / "base")
        publisher = AdapterPublisher(root / "adapters", CARD, self.weights.adaptation)
        resources = contextlib.ExitStack()
        resources.callback(publisher.close)
        self.pool = opened(
            [server.url],
            publisher=publisher,
            target=publisher.publish(self.weights, 0).identity,
            resources=resources,
        )

    def update(self, version):
        self.pool.update_weights(self.weights, version)


@pytest.fixture
def run(server, tmp_path):
    run = Run(server, tmp_path)
    yield run
    server.gate.set()
    run.pool.close()


def numbers(names):
    return [int(name.split("-")[0]) for name in names]


def test_an_adapter_in_use_is_unloaded_after_its_last_request(server, run):
    server.gate.clear()
    made = run.pool.submit(ask())
    server.running.acquire()
    run.update(1)
    run.update(2)
    assert numbers(server.adapters) == [0, 2]
    server.gate.set()
    assert made.result(10).versions == (0,) * 4
    assert run.pool.submit(ask()).result(10).versions == (2,) * 4
    assert numbers([request["model"] for request in server.requests]) == [0, 2]
    run.update(3)
    assert numbers(server.adapters) == [3]
    assert "/pause" not in server.calls


def test_a_restarted_server_gets_the_newest_adapter_before_it_is_used(server, run):
    run.update(1)
    server.restart()
    assert run.pool.submit(ask()).result(10).versions == (1,) * 4
    assert numbers(server.adapters) == [1]


def test_an_adapter_whose_loading_was_not_answered_is_not_loaded_again(server, run):
    load = server._v1_load_lora_adapter

    def lost(body):
        load(body)
        server._v1_load_lora_adapter = load
        return 500, {"error": {"message": "made to fail"}}

    server._v1_load_lora_adapter = lost
    run.update(1)
    assert run.pool.submit(ask()).result(10).versions == (1,) * 4


def test_tokens_of_a_server_whose_base_was_overwritten_are_not_used(server, run):
    server.label = "7-of-another-learner"
    made = run.pool.submit(ask())
    wait_until(lambda: run.pool.metrics()["servers_ready"] == 0 or made.done())
    with pytest.raises(EngineError, match="sampled from weights '7-of-another-learner'"):
        made.result(10)


@pytest.mark.parametrize("other", ["weights", "files"])
def test_a_server_with_another_base_is_refused(server, tmp_path, other):
    if other == "weights":
        server.label = "7-of-another-learner"
    else:
        server.checksums = {"model.norm.weight": 8}
    expected = {"weights": "has been given other weights: restart it", "files": "not those of the"}
    with pytest.raises(EngineError, match=expected[other]):
        Run(server, tmp_path)


def test_servers_that_cannot_take_the_adapters_are_refused_with_a_remedy(server, tmp_path):
    settings = dataclasses.replace(SETTINGS, urls=(server.url,), weights_dir=str(tmp_path / "own"))
    check = lambda rank: check_servers(settings, 64, None, rank)
    check(8)
    with pytest.raises(EngineError, match=r"adapters up to rank 8 only, and lora.rank is 9: start"):
        check(9)
    with pytest.raises(EngineError, match="takes LoRA adapters only: start it without --lora-rank"):
        check(None)
    server.max_lora_rank = 0
    with pytest.raises(EngineError, match=r"takes no LoRA adapters, .* vllm.adapters = False"):
        check(8)
    check(None)
    with pytest.raises(EngineError, match=r"up to rank 512, and lora.rank is 513"):
        check(513)


def test_a_base_that_vllm_cannot_load_is_found_before_anything_is_started(tmp_path):
    settings = VllmSettings(servers=1)
    with pytest.raises(EngineError, match=r"not a Hugging Face directory: .* vllm.adapters ="):
        check_servers(settings, 64, None, 8, tmp_path)
