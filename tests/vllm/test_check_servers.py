"""Unusable servers are reported before a model is loaded."""

import dataclasses

import pytest
from published_models import CARD
from vllm_loopback import LoopbackServer

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError
from manus_jax.models.architecture import Architecture
from manus_jax.rollout.build_rollout import ENGINES
from manus_jax.vllm.addresses import register
from manus_jax.vllm.open_pool import check_servers


@pytest.fixture
def servers(tmp_path):
    made = [LoopbackServer(tmp_path / name) for name in "ab"]
    for server in made:
        server.config = dict(CARD.config)
    yield made
    for server in made:
        server.close()


def settings_of(servers, tmp_path):
    urls = tuple(server.url for server in servers)
    return VllmSettings(urls=urls, weights_dir=str(tmp_path / "weights"))


def test_a_pool_with_too_short_a_context_is_refused_with_both_settings_that_work(servers, tmp_path):
    for server in servers:
        server.max_model_len = 63
    with pytest.raises(EngineError) as caught:
        check_servers(settings_of(servers, tmp_path), 64, CARD.architecture)
    message = str(caught.value)
    assert "none of the 2 vLLM servers can be used" in message
    assert "a context of 63 tokens and 64 are needed" in message
    assert "--max-length 64" in message and "rollout.max_total_tokens = 63" in message


def test_one_server_that_can_be_used_is_enough(servers, tmp_path):
    servers[0].max_model_len = 63
    check_servers(settings_of(servers, tmp_path), 64, CARD.architecture)


def test_servers_that_do_not_answer_yet_are_not_judged(servers, tmp_path):
    servers[0].cut_off = True
    check_servers(settings_of(servers[:1], tmp_path), 64, CARD.architecture)
    address_file = str(tmp_path / "addresses")  # which nobody has written
    settings = VllmSettings(address_file=address_file, weights_dir=str(tmp_path / "weights"))
    check_servers(settings, 64, CARD.architecture)


def test_servers_in_the_address_file_with_another_model_are_refused(servers, tmp_path):
    register(tmp_path / "addresses", servers[0].url)
    settings = VllmSettings(address_file=str(tmp_path / "addresses"), push=False)
    check_servers(settings, 64, CARD.architecture)
    deeper: Architecture = dataclasses.replace(CARD.architecture, num_layers=7)
    with pytest.raises(EngineError, match="serves another model than the one that is trained"):
        check_servers(settings, 64, deeper)


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    where = str(tmp_path / "file" / "weights")
    settings = VllmSettings(urls=("http://10.0.0.7:1",), weights_dir=where)
    with pytest.raises(EngineError, match=r"^vllm.weights_dir .*file/weights cannot be written"):
        check_servers(settings, 64, CARD.architecture)


def test_other_engines_have_no_servers():
    ENGINES["jax"].check(None, 64, CARD.architecture, None, None)
