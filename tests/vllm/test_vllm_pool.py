"""The pool, with loopback servers that respond like vLLM."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import CancelledError

import pytest
from published_models import CARD, changed, model
from vllm_loopback import LoopbackServer

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError, Request, Sampling
from manus_jax.vllm.pool import VllmPool
from manus_jax.weights.manifest import published_versions, version_directory
from manus_jax.weights.publisher import Publisher

SETTINGS = VllmSettings(
    urls=("http://given-to-the-pool",),
    weights_dir="given-to-the-publisher",
    patience=20.0,
    check_every=0.05,
    imbalance=2,
    first_retry=0.02,
    longest_retry=0.1,
    check_timeout=5.0,
    generate_timeout=20.0,
)


@pytest.fixture
def servers(tmp_path):
    made = [LoopbackServer(tmp_path) for _ in range(2)]
    yield made
    for server in made:
        server.close()


@pytest.fixture
def open_pool(servers, tmp_path):
    """(settings) → a pool with both servers in service, and who publishes its next versions."""
    pools = []

    def make(settings=SETTINGS):
        parts = published(tmp_path)
        pools.append(opened([server.url for server in servers], settings, **parts))
        wait_until(lambda: pools[-1].metrics()["servers_ready"] == len(servers))
        return pools[-1], parts["publisher"]

    yield make
    for server in servers:
        server.gate.set()
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(open_pool):
    return open_pool()[0]


def opened(urls, settings=SETTINGS, **options):
    """A pool with a server in service; closed if there is none."""
    pool = VllmPool(urls, 64, settings, **options)
    try:
        pool.await_service()
    except EngineError:
        pool.close()
        raise
    return pool


def published(tmp_path):
    """Version 3 of a small model, and who publishes the next."""
    publisher = Publisher(tmp_path / "weights", CARD)
    target = publisher.publish(model(), 3).identity
    resources = contextlib.ExitStack()
    resources.callback(publisher.close)
    return {"publisher": publisher, "target": target, "resources": resources}


def wait_until(condition):
    for _ in range(4000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come about")


def ask(session="s", seed=5, tokens=4, prompt=(1, 2, 3), **how):
    return Request(tuple(prompt), Sampling(max_tokens=tokens, **how), seed, session)


def test_tokens_log_probs_and_versions_come_back(pool):
    made = pool.submit(ask()).result(20)
    assert made.token_ids == (8, 9, 10, 11)
    assert made.log_probs == (-0.08, -0.09, -0.1, -0.11)
    assert made.versions == (3, 3, 3, 3)
    assert made.finish_reason == "length"


def test_the_server_receives_the_sampling_parameters_of_the_request(pool, servers):
    pool.submit(
        ask(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_ids=(7,), stop_strings=("x",))
    ).result(20)
    (asked,) = [request for server in servers for request in server.requests]
    assert asked["token_ids"] == [1, 2, 3]
    assert asked["model"] == "policy"
    assert asked["sampling_params"] == {
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 5,
        "logprobs": 0,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "stop": ["x"],
    }


def test_a_session_stays_with_its_server_until_it_is_released(pool, servers):
    for turn in range(4):
        pool.submit(ask("a", seed=turn)).result(20)
    assert sorted(len(server.requests) for server in servers) == [0, 4]
    assert pool.metrics()["sessions_moved"] == 0


def test_sessions_are_spread_over_the_servers(pool, servers):
    for server in servers:
        server.gate.clear()
    futures = [pool.submit(ask(f"s{n}")) for n in range(8)]
    for server in servers:
        for _ in range(4):
            assert server.running.acquire(timeout=20)
    assert [len(server.requests) for server in servers] == [4, 4]
    for server in servers:
        server.gate.set()
    assert all(future.result(20).token_ids for future in futures)


def test_a_full_pool_makes_requests_wait_and_a_full_queue_refuses(open_pool, servers):
    pool, _ = open_pool(dataclasses.replace(SETTINGS, queue_size=1))
    for server in servers:
        server.gate.clear()
    futures = []
    for n in range(8):
        futures.append(pool.submit(ask(f"s{n}")))
        wait_until(lambda n=n: pool.metrics()["in_flight"] == n + 1)
    futures.append(pool.submit(ask("waits")))
    with pytest.raises(EngineError, match="1 requests are already waiting"):
        pool.submit(ask("too many"))
    for server in servers:
        server.gate.set()
    assert all(len(future.result(20).token_ids) == 4 for future in futures)


def test_new_weights_are_loaded_by_every_server_in_the_right_order(pool, servers):
    for server in servers:
        server.calls.clear()
    pool.update_weights(changed(model(), 0.01, 1), 4)
    assert pool.version == 4
    assert pool.submit(ask()).result(20).versions == (4, 4, 4, 4)
    steps = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    steps += ["/reset_prefix_cache", "/resume"]
    for server in servers:
        assert [call for call in server.calls if call in steps] == steps
        fetched = max(n for n, call in enumerate(server.calls) if call == "/collective_rpc")
        assert fetched < server.calls.index("/pause")


def test_a_generation_during_an_update_has_the_version_of_each_token(pool, servers):
    for server in servers:
        server.gate.clear()
    future = pool.submit(ask())
    wait_until(lambda: pool.metrics()["in_flight"])
    assert any(server.running.acquire(timeout=5) for server in servers)
    pool.update_weights(changed(model(), 0.01, 1), 4)
    for server in servers:
        server.gate.set()
    assert future.result(20).versions == (3, 3, 4, 4)


def test_a_server_that_dies_with_a_request_has_it_served_elsewhere_with_the_same_seed(
    pool, servers
):
    for server in servers:
        server.gate.clear()
    future = pool.submit(ask("a", seed=9))
    wait_until(lambda: pool.metrics()["in_flight"])
    first = next(server for server in servers if server.running.acquire(timeout=5))
    other = next(server for server in servers if server is not first)
    other.gate.set()
    first.cut_off = True
    first.gate.set()
    assert future.result(20).token_ids == (12, 13, 14, 15)
    assert len(other.requests) == 1
    assert pool.metrics()["servers_ready"] == 1
    assert pool.metrics()["sessions_moved"] == 1


def test_a_server_that_hangs_gives_up_its_requests_when_it_fails_its_check(pool, servers):
    for server in servers:
        server.gate.clear()
    future = pool.submit(ask("a"))
    wait_until(lambda: pool.metrics()["in_flight"])
    first = next(server for server in servers if server.running.acquire(timeout=5))
    next(server for server in servers if server is not first).gate.set()
    first.failing["/health"] = 503
    assert future.result(20).finish_reason == "length"


@pytest.mark.slow
def test_a_server_that_was_restarted_is_brought_to_the_current_weights_before_it_serves(
    pool, servers
):
    pool.update_weights(changed(model(), 0.01, 1), 4)
    servers[0].restart()
    wait_until(lambda: servers[0].label.startswith("4-"))
    wait_until(lambda: pool.metrics()["servers_ready"] == 2)
    for n in range(4):
        assert pool.submit(ask(f"s{n}")).result(20).versions == (4,) * 4


@pytest.mark.slow
def test_a_server_that_missed_an_update_catches_up_when_it_is_back(pool, servers):
    servers[0].cut_off = True
    wait_until(lambda: pool.metrics()["servers_ready"] == 1)
    for version in (4, 5):
        pool.update_weights(changed(model(), 0.01, version), version)
    servers[0].cut_off = False
    wait_until(lambda: pool.metrics()["servers_ready"] == 2)
    assert servers[0].label == servers[1].label
    assert servers[0].label.startswith("5-")


def test_a_damaged_version_is_never_loaded_and_nothing_is_paused_for_it(
    open_pool, servers, tmp_path
):
    pool, publisher = open_pool()
    publish = publisher.publish

    def damaged(params, version):
        published = publish(params, version)
        file = version_directory(tmp_path / "weights", version) / "delta.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return published

    publisher.publish = damaged
    pool._settings = dataclasses.replace(SETTINGS, patience=0.3)  # too short to start with
    for server in servers:
        server.calls.clear()
    with pytest.raises(EngineError, match="is damaged"):
        pool.update_weights(changed(model(), 0.01, 1), 4)
    for server in servers:
        assert "/pause" not in server.calls
        assert server.label.startswith("3-")


def test_an_error_that_is_the_requests_own_is_not_tried_again(pool, servers):
    with pytest.raises(EngineError, match="Token id 13 is out of vocabulary"):
        pool.submit(ask(prompt=(13,))).result(20)
    assert sum(len(server.requests) for server in servers) == 1
    assert pool.metrics()["servers_ready"] == 2


def test_a_request_that_fails_everywhere_fails_in_the_end(pool, servers):
    for server in servers:
        server.failing["/inference/v1/generate"] = 500
    with pytest.raises(EngineError, match=r"failed 4 times, last: .*made to fail"):
        pool.submit(ask()).result(20)
    assert pool.metrics()["servers_ready"] == 2


def test_a_cancelled_generation_is_ended_on_its_server(pool, servers):
    for server in servers:
        server.gate.clear()
    future = pool.submit(ask())
    wait_until(lambda: pool.metrics()["in_flight"])
    server = next(server for server in servers if server.running.acquire(timeout=5))
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(20)
    wait_until(lambda: pool.metrics()["in_flight"] == pool.metrics()["queue_length"] == 0)
    assert len(server.aborted) == 1
    assert pool.metrics()["servers_ready"] == 2


def test_servers_join_and_leave(pool, servers, tmp_path):
    third = LoopbackServer(tmp_path)
    pool.add_server(third.url)
    wait_until(lambda: pool.metrics()["servers_ready"] == 3)
    assert third.label == servers[0].label
    for server in servers:
        pool.remove_server(server.url)
    assert pool.submit(ask("a")).result(20).versions == (3,) * 4
    assert len(third.requests) == 1
    third.close()


def test_prompts_without_room_are_refused_and_budgets_are_cut(pool, servers):
    with pytest.raises(EngineError, match="64 tokens; max_length = 64 leaves no room"):
        pool.submit(ask(prompt=[1] * 64))
    with pytest.raises(EngineError, match="max_tokens must be at least 1, got 0"):
        pool.submit(ask(tokens=0))
    assert len(pool.submit(ask(prompt=[1] * 60, tokens=100)).result(20).token_ids) == 4


def test_closing_fails_running_and_later_requests(pool, servers):
    for server in servers:
        server.gate.clear()
    future = pool.submit(ask())
    pool.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        future.result(20)
    with pytest.raises(EngineError, match="the engine is closed"):
        pool.submit(ask())


def test_metrics_are_kept_per_server(pool, servers):
    pool.submit(ask()).result(20)
    numbers = pool.metrics()
    names = [server.url.removeprefix("http://") for server in servers]
    assert sum(numbers[f"server/{name}/tokens"] for name in names) == 4
    assert sum(numbers[f"server/{name}/requests"] for name in names) == 1
    assert [numbers[f"server/{name}/updates"] for name in names] == [1, 1]


def test_time_without_requests_does_not_count_into_a_servers_tokens_per_second(pool, servers):
    name = f"server/{servers[0].url.removeprefix('http://')}"
    pool.remove_server(servers[1].url)
    pool.submit(ask(tokens=40)).result(20)
    numbers = pool.metrics()
    assert numbers[f"{name}/busy_seconds"] > 0
    assert numbers[f"{name}/tokens_per_second"] == pytest.approx(
        40 / numbers[f"{name}/busy_seconds"]
    )
    time.sleep(0.05)
    assert pool.metrics()[f"{name}/busy_seconds"] == numbers[f"{name}/busy_seconds"]


def test_the_share_of_cached_prompt_tokens_is_a_metric(pool, servers):
    names = [f"server/{server.url.removeprefix('http://')}" for server in servers]
    servers[0].cache = (200, 150)
    wait_until(lambda: pool.metrics()[f"{names[0]}/prefix_cache_hit_rate"] == 0.75)
    assert pool.metrics()[f"{names[1]}/prefix_cache_hit_rate"] == 0


def test_requests_waiting_on_servers_and_the_fullest_cache_are_metrics(pool, servers):
    servers[0].engines = [(3, 0.25), (1, 0.5)]
    servers[1].engines = [(2, 0.125)]
    wait_until(lambda: pool.metrics()["queue_length"] == 6)
    assert pool.metrics()["kv_usage"] == 0.5


def test_waiting_for_the_only_server_and_its_return_are_logged(tmp_path, caplog):
    server = LoopbackServer(tmp_path)
    pool = opened([server.url], **published(tmp_path))
    server.cut_off = True
    future = pool.submit(ask())
    wait_until(lambda: "no vLLM server is in service: waiting up to 20 s" in caplog.text)
    assert "does not answer" in caplog.text
    server.cut_off = False
    assert len(future.result(20).token_ids) == 4
    assert f"{server.url} is in service again" in caplog.text
    pool.remove_server(server.url)
    assert caplog.text.count("no vLLM server is in service: waiting up to 20 s") == 2
    with pytest.raises(EngineError, match="the engine is closed"):
        in_vain = pool.submit(ask())
        pool.close()
        in_vain.result(20)
    server.close()


def test_a_check_that_ends_after_the_pool_is_closed_logs_nothing(tmp_path, caplog):
    server = LoopbackServer(tmp_path)
    pool = opened([server.url], **published(tmp_path))
    (member,) = pool._members.values()
    pool.close()
    server.close()
    pool._check(member)
    assert "out of service" not in caplog.text


def test_the_key_is_sent_with_every_request(tmp_path):
    server = LoopbackServer(tmp_path)
    server.key = "s3cret"
    pool = opened([server.url], **published(tmp_path), api_key="s3cret")
    assert len(pool.submit(ask()).result(20).token_ids) == 4
    pool.close()
    server.close()
    assert "s3cret" not in repr(pool)


def test_a_server_of_the_same_model_serves_and_one_of_another_is_named(tmp_path):
    server = LoopbackServer(tmp_path)
    server.config = {**CARD.config, "max_position_embeddings": 64}
    expected = {"model": CARD.architecture, "settings": SETTINGS}
    parts = published(tmp_path)
    pool = opened([server.url], **parts, **expected)
    pool.close()
    server.config |= {"num_hidden_layers": 3, "rms_norm_eps": 1e-5}
    with pytest.raises(
        EngineError, match=r"another model .*: num_layers is 3 and not 2, norm_eps is 1e-05 and not"
    ):
        opened([server.url], target=parts["target"], **expected)
    server.config |= {"model_type": "gemma"}
    with pytest.raises(EngineError, match=r"another model .* 'gemma' is not supported"):
        opened([server.url], target=parts["target"], **expected)
    assert "/pause" not in server.calls[-10:]
    server.close()


def test_an_update_examines_a_server_again_if_it_was_started_again(tmp_path):
    """Before the next look at it, which is far away."""
    server = LoopbackServer(tmp_path)
    server.config = dict(CARD.config)
    settings = dataclasses.replace(SETTINGS, check_every=3600.0)
    expected = {"model": CARD.architecture, "settings": settings}
    pool = opened([server.url], **published(tmp_path), **expected)
    server.calls.clear()
    pool.update_weights(changed(model(), 0.5, 1), 4)
    assert "/server_info" not in server.calls
    server.restart()
    server.config["rms_norm_eps"] = 1e-3
    with pytest.raises(EngineError, match=r"serves another model .*norm_eps is 0\.001"):
        pool.update_weights(changed(model(), 0.5, 2), 5)
    assert server.label == "default"
    pool.close()
    server.close()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_model_len": 63}, "a context of 63 tokens and 64 are needed"),
        ({"logprobs_mode": "raw_logprobs"}, "give it --logprobs-mode processed_logprobs"),
        ({"backend": None}, "without this project's plug-in"),
        ({"key": "s3cret"}, "answered 401: .*give the key that it was started with in VLLM_API"),
        ({"failing": {"/server_info?config_format=json": 404}}, r"manus_jax\.serve"),
    ],
)
def test_an_incompatible_server_is_named_with_the_remedy(tmp_path, change, message):
    server = LoopbackServer(tmp_path)
    for name, value in change.items():
        setattr(server, name, value)
    settings = dataclasses.replace(SETTINGS, patience=600.0)  # which is not waited for
    with pytest.raises(EngineError, match=f"no vLLM server can be used: .*{message}"):
        opened([server.url], settings, **published(tmp_path))
    server.close()


def test_a_server_that_does_not_answer_is_given_up_after_a_while(tmp_path):
    server = LoopbackServer(tmp_path)
    server.cut_off = True
    settings = dataclasses.replace(SETTINGS, patience=0.3)
    with pytest.raises(EngineError, match=r"in service after 0.3 s: .* does not answer"):
        opened([server.url], settings, **published(tmp_path))
    server.close()


def test_without_a_publisher_servers_keep_their_weights(tmp_path):
    server = LoopbackServer(tmp_path)
    server.backend = None
    pool = opened([server.url])
    assert pool.submit(ask()).result(20).versions == (0,) * 4
    with pytest.raises(EngineError, match="keep their weights"):
        pool.update_weights(model(), 8)
    assert "/pause" not in server.calls
    assert published_versions(tmp_path) == []
    pool.close()
    server.close()


def test_requests_share_a_bounded_number_of_workers(pool, servers):
    for server in servers:
        server.gate.clear()
    futures = [pool.submit(ask(f"s{n}")) for n in range(40)]
    assert pool.metrics()["in_flight"] == 8 and pool.metrics()["queue_length"] == 32
    workers = [t for t in threading.enumerate() if t.name.startswith("vllm_")]
    assert len(workers) <= 2 * (4 + 3)
    for server in servers:
        server.gate.set()
    assert all(len(future.result(20).token_ids) == 4 for future in futures)


def test_closing_does_not_wait_for_a_server_that_hangs(tmp_path):
    server = LoopbackServer(tmp_path)
    pool = opened([server.url], **published(tmp_path))
    server.gate.clear()
    future = pool.submit(ask())
    assert server.running.acquire(timeout=20)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 10
    with pytest.raises(EngineError, match="the engine is closed"):
        future.result(20)
    server.close()


def test_a_server_that_computes_in_another_type_than_requested_is_reported(
    servers, tmp_path, caplog
):
    servers[1].dtype = "torch.bfloat16"
    urls = [server.url for server in servers]
    pool = opened(urls, dtype="float32", **published(tmp_path))
    wait_until(lambda: pool.metrics()["servers_ready"] == 2)
    pool.close()
    (line,) = [line for line in caplog.messages if "computes in" in line]
    assert line.startswith(f"{urls[1]} computes in bfloat16 and engine.dtype is float32")
