"""Access to a server: keys, web pages, guessed ids, and clients that exceed their limits."""

import json
import logging
import socket
import time
from urllib.parse import urlsplit

import pytest
from env_servers import AppServer, Client

from envs import bounded_connection
from envs.registry import ENVIRONMENTS, load
from envs.server import build_app

MAZE = load("maze")


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def test_a_key_is_needed_on_every_route_of_a_server_that_has_one(serve_app: AppServer) -> None:
    client = Client(serve_app(build_app(MAZE, api_key="s3cret")) + "/maze")
    for method, path in (("GET", "/"), ("GET", "/list_envs"), ("POST", "/create")):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            status, text = client.send(method, path, None, **headers)
            assert status == 401 and b"Authorization: Bearer KEY" in text
        assert client.send(method, path, None, Authorization="Bearer s3cret")[0] == 200
    assert client.send("GET", "/", None, Authorization="Bearer \xe9\xff")[0] == 401


def test_web_pages_cannot_send_requests(serve_app: AppServer) -> None:
    client = Client(serve_app(build_app(MAZE)) + "/maze")
    page = {"Origin": "http://example.com"}
    assert client.send("POST", "/create", b"{}", **page)[0] == 403
    assert client.send("POST", "/create", b"{}", Content_Type="text/plain")[0] == 415
    form = "application/x-www-form-urlencoded"
    assert client.send("POST", "/create", b"{}", Content_Type=form)[0] == 415
    assert client.get("/list_envs") == (200, [])
    kind = "application/json; charset=utf-8"
    assert client.send("POST", "/create", b"{}", Content_Type=kind)[0] == 200


def test_ids_cannot_be_guessed(serve_app: AppServer) -> None:
    client = Client(serve_app(build_app(MAZE)) + "/maze")
    ids = [client.ok("/create")["id"] for _ in range(40)]
    assert len(set(ids)) == 40 and min(ids) >= 0 and 2**48 < max(ids) < 2**53
    assert ids != sorted(ids)
    assert client.get("/list_envs") == (200, ids)


def test_one_client_cannot_take_all_sessions_nor_see_those_of_others(serve_app: AppServer) -> None:
    url = serve_app(build_app(MAZE, max_sessions=4, max_sessions_per_client=3)) + "/maze"
    client = Client(url)
    mine = [client.ok("/create")["id"] for _ in range(3)]
    error = client.ok("/create")["error"]
    assert "127.0.0.1 already has 3 live sessions" in error
    assert "--max_sessions_per_client" in error
    # uvicorn takes the address of a client from a proxy on the same machine.
    other = {"X_Forwarded_For": "10.1.2.3"}
    status, text = client.send("POST", "/create", None, **other)
    assert status == 200
    assert json.loads(client.send("GET", "/list_envs", None, **other)[1]) == [
        json.loads(text)["id"]
    ]
    assert client.get("/list_envs") == (200, mine)
    assert "--max_sessions." in client.send("POST", "/create", None, **other)[1].decode()
    client.ok("/close", {"id": mine[0]})
    assert "id" in client.ok("/create")


BAD_IDS = ("NaN", "Infinity", "-Infinity", "1e400", "1" * 5000, str(2**64), "null", "[]", "1.5")


@pytest.mark.parametrize("name", sorted(set(ENVIRONMENTS) - {"sciworld"}))
def test_an_id_that_is_no_integer_is_422_on_every_route(serve_app: AppServer, name: str) -> None:
    spec = load(name)
    client = Client(serve_app(build_app(spec)) + spec.prefix)
    posts = ["/step", "/reset", "/close"]
    posts += [route.path for route in spec.routes if getattr(route, "method", "") == "POST"]
    for bad in BAD_IDS:
        for path in posts:
            body = f'{{"{spec.family}": {bad}, "{spec.item_field}": 1, "action": "x"}}'
            status, text = client.send("POST", path, body.encode())
            assert status == 422 and len(text) < 1000, (path, bad)
            assert json.loads(text)["detail"][0]["loc"][0] == "body"
        status, text = client.send("GET", f"/observation?{spec.family}={bad}")
        assert status == 422 and len(text) < 1000
    for bad_item in ("NaN", "1e400", "1" * 5000):
        body = f'{{"{spec.family}": 1, "{spec.item_field}": {bad_item}}}'
        assert client.send("POST", "/reset", body.encode())[0] == 422
    for body in ("[" * 100_000, '{"a": ' * 100_000, '{"action": "' + "x" * 10**6 + '"}', "\ud800"):
        status, text = client.send("POST", "/step", body.encode("utf-8", "surrogatepass"))
        assert status == 422 and len(text) < 2000
    assert client.get("/")[0] == 200


def test_a_client_that_disconnects_leaves_no_traceback(
    serve_app: AppServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    url = serve_app(build_app(MAZE)) + "/maze"
    for end in (b"", b"{"):
        with connect(url) as client:
            head = b"POST /maze/step HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
            client.sendall(head + end)
            time.sleep(0.05)
    assert Client(url).get("/")[0] == 200
    time.sleep(0.05)
    assert not caplog.records


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"POST /maze/step HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n",
    ],
)
def test_an_incomplete_request_is_closed_in_time(
    serve_app: AppServer, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(bounded_connection, "REQUEST_SECONDS", 0.3)
    url = serve_app(build_app(MAZE))
    with connect(url) as slow:
        slow.sendall(start)
        began = time.monotonic()
        with pytest.raises(OSError):  # closed by the server
            while time.monotonic() - began < 5:
                slow.sendall(b" ")  # a few bytes at a time do not extend it
                time.sleep(0.05)
    assert Client(url).get("/")[0] == 200


def test_an_endless_head_is_refused(serve_app: AppServer) -> None:
    url = serve_app(build_app(MAZE))
    with connect(url) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (bounded_connection.MAX_HEAD_BYTES + 1))
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    assert Client(url).get("/")[0] == 200
