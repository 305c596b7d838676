"""The address file: concurrent writers, atomic replacement, and a pool that follows it."""

import subprocess
import sys
import threading
import time

import pytest
from vllm_loopback import LoopbackServer

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError
from manus_jax.vllm.addresses import (
    AddressError,
    AddressFollower,
    check_address_file,
    read_addresses,
    register,
    unregister,
)
from manus_jax.vllm.open_pool import open_vllm


def test_a_person_may_write_it(tmp_path):
    path = tmp_path / "addresses"
    assert read_addresses(path) == []
    path.write_text("# ours\nhttp://a:1/\n\nhttp://b:2  # the big one\nhttp://a:1\n")
    assert read_addresses(path) == ["http://a:1", "http://b:2"]
    path.write_text("http://a:1\na:2\n")
    with pytest.raises(AddressError, match=r"line 2: 'a:2' is not an address like"):
        read_addresses(path)


def test_a_place_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(AddressError, match=r"no directory .*gone for the address file f"):
        check_address_file(tmp_path / "gone" / "f")
    with pytest.raises(AddressError, match=r"cannot be read: Is a directory"):
        check_address_file(tmp_path)


@pytest.mark.parametrize(
    "text", ["http://", "http://a:port", "http://a:99999", "http://[::1", "http://a/b", "ftp://a:1"]
)
def test_what_is_no_address_is_named_with_its_line(tmp_path, text):
    path = tmp_path / "addresses"
    path.write_text(f"http://a:1\n{text}\n")
    with pytest.raises(AddressError, match=r"line 2: .* is not an address like"):
        read_addresses(path)


def test_a_file_that_is_something_else_is_one_short_line(tmp_path):
    path = tmp_path / "addresses"
    path.write_bytes(bytes(range(256)) * 10_000)
    with pytest.raises(AddressError, match=r"line 1: .* is not an address") as error:
        check_address_file(path)
    assert len(str(error.value)) < 600


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "addresses"
    code = (
        "import sys; from pathlib import Path\n"
        "from manus_jax.vllm.addresses import register, unregister\n"
        "for n in range(1, 21):\n"
        f"    register(Path({str(path)!r}), f'http://{{sys.argv[1]}}:{{n}}')\n"
        f"for n in range(1, 21, 2):\n"
        f"    unregister(Path({str(path)!r}), f'http://{{sys.argv[1]}}:{{n}}')\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    while any(writer.poll() is None for writer in writers):
        read_addresses(path)  # always whole
    assert all(writer.returncode == 0 for writer in writers)
    expected = {f"http://{name}:{n}" for name in "abc" for n in range(2, 21, 2)}
    assert set(read_addresses(path)) == expected
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == [".addresses.lock", "addresses"]


def replace(path, text):
    beside = path.with_name("beside")
    beside.write_text(text)
    beside.rename(path)


def test_a_follower_tells_who_came_and_who_went(tmp_path, caplog):
    path = tmp_path / "addresses"
    register(path, "http://a:1")
    told, changed = [], threading.Condition()

    def tell(what):
        def note(url):
            with changed:
                told.append((what, url))
                changed.notify_all()

        return note

    def await_told(count):
        with changed:
            assert changed.wait_for(lambda: len(told) >= count, 30)

    follower = AddressFollower(path, ["http://a:1"], every=0.01)
    follower.start(tell("joined"), tell("left"))
    register(path, "http://b:2")
    await_told(1)
    replace(path, "nonsense\n")  # changes nothing until it is right again
    wait(lambda: "nonsense" in caplog.text)
    replace(path, "http://b:2\n")
    await_told(2)
    follower.close()
    assert told == [("joined", "http://b:2"), ("left", "http://a:1")]


def test_a_pool_takes_in_who_registers_and_lets_go_who_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr("manus_jax.vllm.addresses._FOLLOW_SECONDS", 0.02)
    path = tmp_path / "addresses"
    first, second = (LoopbackServer(tmp_path / name) for name in "ab")
    register(path, first.url)
    settings = VllmSettings(address_file=str(path), push=False)
    pool = open_vllm(None, None, settings, slots=4, dtype="float32", max_length=32)
    try:
        register(path, second.url)
        wait(lambda: pool.metrics()["servers_ready"] == 2)
        unregister(path, first.url)
        wait(lambda: pool.metrics()["servers"] == 1)
        assert pool.metrics()["servers_ready"] == 1
    finally:
        pool.close()
        first.close()
        second.close()


def wait(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_an_empty_file_is_waited_for_and_then_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("manus_jax.vllm.open_pool._POLL_SECONDS", 0.01)
    settings = VllmSettings(address_file=str(tmp_path / "none"), push=False, patience=0.05)
    with pytest.raises(EngineError, match="it lists none; start servers with"):
        open_vllm(None, None, settings, slots=4, dtype="float32", max_length=32)
