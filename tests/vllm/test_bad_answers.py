"""Invalid responses of servers are not used, and other servers take over."""

import dataclasses
import time

import pytest
from published_models import CARD
from test_vllm_pool import SETTINGS, ask, opened, published, wait_until
from vllm_loopback import LoopbackServer

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError
from manus_jax.servers.bounded_http import BadResponse, parse_json
from manus_jax.vllm.client import BadAnswer, IncompatibleServer, ServerFailure, VllmServer
from manus_jax.vllm.pool import VllmPool

GENERATE = "/inference/v1/generate"
NAN = float("nan")


def set_entry(key, value):
    return lambda choice: choice["logprobs"]["content"][1].update({key: value})


def set_ids(change):
    """Changes the ids, and the log-probs with them."""

    def distort(choice):
        ids = choice["token_ids"] = change(choice["token_ids"])
        content = [{"token_id": i, "logprob": -0.1, "rank": 1} for i in ids]
        choice["logprobs"] = {"content": content}
        choice["weight_versions"][-1]["end"] = len(ids)

    return distort


WRONG_GENERATIONS = {
    "an id outside the vocabulary": (set_ids(lambda ids: [*ids[:-1], 10**6]), "the model has"),
    "a negative id": (set_ids(lambda ids: [*ids[:-1], -1]), "token ids -1"),
    "ids that are fractions": (set_ids(lambda ids: [i + 0.5 for i in ids]), "other tokens"),
    "ids that are text": (set_ids(lambda ids: [str(i) for i in ids]), "other tokens"),
    "a log-prob that is NaN": (set_entry("logprob", NAN), "the log-prob nan"),
    "a log-prob of minus infinity": (set_entry("logprob", -float("inf")), "the log-prob -inf"),
    "vLLM's minus infinity": (set_entry("logprob", -9999.0), "the log-prob -9999.0"),
    "a probability above 1": (set_entry("logprob", 0.5), "the log-prob 0.5"),
    "no log-prob": (set_entry("logprob", None), "TypeError"),
    "the log-prob of another token": (set_entry("token_id", 3), "other tokens"),
    "fewer tokens than asked for": (set_ids(lambda ids: ids[:2]), "2 tokens of 4"),
    "more tokens than asked for": (set_ids(lambda ids: ids * 2), "8 tokens of 4"),
    "no tokens": (set_ids(lambda ids: []), "0 tokens of 4"),
    "fewer log-probs": (lambda c: c["logprobs"]["content"].pop(), "log-probs of 3 other"),
    "no log-probs": (lambda c: c.update(logprobs=None), "TypeError"),
    "a stop that is none": (lambda c: c.update(finish_reason="stop"), "is not a stop token"),
    "an unknown end": (lambda c: c.update(finish_reason="error"), "ended a generation with"),
    "weights of nobody": (
        lambda c: c["weight_versions"][0].update(version="3-of-another-run"),
        "sampled from weights '3-of-another-run', which it was not given",
    ),
    "weights of no tokens": (lambda c: c.update(weight_versions=[]), "4 tokens and 0 weight"),
    "weights of other tokens": (
        lambda c: c["weight_versions"][0].update(start=1, end=5),
        "weight versions of other tokens",
    ),
    "weights of a billion tokens": (
        lambda c: c["weight_versions"][0].update(end=10**9),
        "weight versions of other tokens",
    ),
}


@pytest.fixture
def server(tmp_path):
    server = LoopbackServer(tmp_path)
    yield server
    server.close()


def known(label):
    return {"3-a": 3}.get(label)


@pytest.mark.parametrize("distort, message", WRONG_GENERATIONS.values(), ids=WRONG_GENERATIONS)
def test_a_wrong_generation_is_a_failure_of_the_server(server, distort, message):
    server.label, server.distort = "3-a", distort
    with pytest.raises(ServerFailure, match=message):
        VllmServer(server.url).generate(ask(), "id", known, 64)


def test_a_right_generation_is_none(server):
    server.label = "3-a"
    assert VllmServer(server.url).generate(ask(), "id", known, 64).versions == (3,) * 4
    with pytest.raises(BadAnswer, match="tokens after a stop token"):
        VllmServer(server.url).generate(ask(stop_ids=(9,)), "id", known, 64)
    server.distort = lambda c: (set_ids(lambda ids: ids[:2])(c), c.update(finish_reason="stop"))
    made = VllmServer(server.url).generate(ask(stop_ids=(9,)), "id", known, 64)
    assert made.token_ids == (8, 9)


def drip(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    for _ in range(100):
        connection.sendall(b" ")
        time.sleep(0.02)


def drip_headers(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for n in range(90):
        connection.sendall(b"a%d: b\r\n" % n)
        time.sleep(0.02)


def endless(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    while True:
        connection.sendall(chunk)


def says(text):
    return lambda connection: connection.sendall(text)


@pytest.mark.parametrize(
    "answer, message",
    [
        (drip, "took more than 0.3 s"),
        (drip_headers, "took more than 0.3 s"),
        (endless, "is larger than 1 MiB"),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n{}" % 10**12), "does not answer"),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"), "does not answer"),
        (says(b"SSH-2.0-OpenSSH_9.2\r\n"), "is not valid HTTP"),
        (says(b""), "does not answer"),
        (says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "does not answer"),
        ("[" * 100_000, "nested more than 500 levels deep"),
        ('{"choices": [' + "9" * 5000 + "]}", "is not valid JSON"),
        ("<html>", "is not valid JSON"),
        ("null", "unexpected answer"),
        ('{"choices": []}', "unexpected answer"),
        ('{"choices": [3]}', "unexpected answer"),
        ('{"choices": [{"finish_reason": "stop", "token_ids": 1e400}]}', "unexpected answer"),
    ],
)
def test_a_response_that_is_slow_endless_or_malformed_fails_in_time(
    server, answer, message, monkeypatch
):
    monkeypatch.setattr("manus_jax.vllm.client._MAX_BYTES", 1 << 20)
    server.instead[GENERATE] = answer
    settings = VllmSettings(urls=(server.url,), push=False, generate_timeout=0.3)
    began = time.monotonic()
    with pytest.raises(ServerFailure, match=message):
        VllmServer(server.url, settings).generate(ask(), "id", known, 64)
    assert time.monotonic() - began < 1.5


def test_json_is_parsed_up_to_a_depth():
    deep = b'{"a": ' * 400 + b"1" + b"}" * 400
    assert parse_json(deep)["a"]["a"]
    with pytest.raises(BadResponse):
        parse_json(b"[" * 400 + b"{" * 400)


@pytest.mark.parametrize(
    "answer", ["{}", "[]", "null", "3", '{"data": []}', '{"data": [{"id": "x"}]}', "hello", ""]
)
@pytest.mark.parametrize("path", ["/v1/models", "/server_info"])
def test_a_program_that_is_not_vllm_is_refused_at_once(server, answer, path):
    server.instead[path] = answer
    settings = dataclasses.replace(SETTINGS, patience=600.0)  # which is not waited for
    with pytest.raises(EngineError, match=r"no vLLM server can be used: .* is not a vLLM server"):
        opened([server.url], settings)


@pytest.mark.parametrize(
    "path, answer", [("/weight_info", "{}"), ("/collective_rpc", '{"results": [null]}')]
)
def test_wrong_answers_of_other_routes_mark_a_server_down(server, tmp_path, caplog, path, answer):
    server.instead[path] = answer
    pool = VllmPool([server.url], 64, SETTINGS, **published(tmp_path))
    wait_until(lambda: "unexpected answer" in caplog.text)
    del server.instead[path]
    pool.await_service()
    pool.close()
    assert "Traceback" not in caplog.text


def test_unreadable_metrics_are_left_out(server, caplog):
    server.instead["/metrics"] = "vllm:prefix_cache_hits_total{} many"
    pool = opened([server.url])
    wait_until(lambda: server.calls.count("/metrics") > 1)
    pool.close()
    assert not caplog.text


def test_a_server_with_wrong_answers_loses_its_requests_to_another(tmp_path):
    bad, good = (LoopbackServer(tmp_path) for _ in range(2))
    for server in (bad, good):
        server.config = CARD.config
    bad.distort = set_entry("logprob", NAN)
    settings = dataclasses.replace(SETTINGS, first_retry=30.0, longest_retry=60.0)
    urls = [bad.url, good.url]
    pool = opened(urls, settings, **published(tmp_path), model=CARD.architecture)
    wait_until(lambda: pool.metrics()["servers_ready"] == 2)
    made = [pool.submit(ask(f"s{n}", seed=n)).result(20) for n in range(8)]
    assert [m.token_ids[0] for m in made] == [n + 3 for n in range(8)]
    assert len(bad.requests) == 3 and pool.metrics()["servers_ready"] == 1
    pool.close()
    for server in (bad, good):
        server.close()


def test_the_only_server_with_wrong_answers_fails_the_request(server, tmp_path):
    server.distort = set_entry("logprob", NAN)
    pool = opened([server.url], **published(tmp_path))
    with pytest.raises(EngineError, match=r"failed 4 times, last: .*the log-prob nan"):
        pool.submit(ask()).result(20)
    pool.close()


def test_the_cache_of_old_weights_is_dropped_when_an_update_was_interrupted_after_it(
    server, tmp_path
):
    server.failing["/reset_prefix_cache?reset_running_requests=true"] = 500
    pool = VllmPool([server.url], 64, SETTINGS, **published(tmp_path))
    wait_until(lambda: server.calls.count("/reset_prefix_cache") > 1)
    assert server.label.startswith("3-") and server.paused
    server.failing.clear()
    pool.await_service()
    assert server.calls.count("/pause") == 1 and not server.paused
    pool.close()


@pytest.mark.parametrize("change", [{"model_path": "/models/other"}, {"label": "7-b"}])
def test_a_server_that_keeps_its_weights_and_comes_back_with_others_is_refused(server, change):
    pool = opened([server.url])
    for name, value in change.items():
        setattr(server, name, value)
    wait_until(lambda: pool.metrics()["servers_ready"] == 0)
    with pytest.raises(EngineError, match=r"no vLLM server can be used: .*it was restarted; start"):
        pool.await_service()
    server.model_path, server.label = "/models/policy", "default"
    wait_until(lambda: pool.metrics()["servers_ready"] == 1)
    pool.close()


def test_weights_that_another_learner_gave_a_server_are_not_sampled_from(server, tmp_path):
    """Between two health checks, and with the same number."""
    settings = dataclasses.replace(SETTINGS, check_every=3600.0)
    pool = opened([server.url], settings, **published(tmp_path))
    ours = server.label
    server.label = "3-of-another-run"
    assert pool.submit(ask()).result(20).versions == (3,) * 4
    assert server.label == ours and pool.metrics()["servers_ready"] == 1
    pool.close()


def test_a_broken_error_message_is_shortened(server):
    server.instead["/health"] = lambda connection: connection.sendall(
        b"HTTP/1.1 500 no\r\nContent-Length: 4000\r\n\r\n" + b"\xff" * 4000
    )
    with pytest.raises(ServerFailure) as failure:
        VllmServer(server.url).check_health()
    assert len(str(failure.value)) < 500


def test_a_redirect_is_not_followed(server):
    server.instead["/v1/models"] = says(
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    )
    with pytest.raises(IncompatibleServer, match="answered 302"):
        VllmServer(server.url).examine(1, False, None)


def test_numbers_of_requests_that_no_server_has_are_refused(server):
    for slots in (0, -1, 10**9):
        server.slots = slots
        with pytest.raises(IncompatibleServer, match="max_num_seqs"):
            VllmServer(server.url).examine(1, False, None)
