"""The server framework: both id families, limits, expiry, independent sessions."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from env_servers import AppServer, Client

from envs.game import EnvironmentSpec, GameError, Step, fixed_splits
from envs.server import build_app

pytestmark = pytest.mark.usefixtures("counted_ids")


class Echo:
    """Repeats the action; "end" ends the episode, "crash" is a bug, "wait" waits for `release`."""

    closed: list["Echo"]
    waiting: threading.Event
    release: threading.Event

    def __init__(self) -> None:
        self.item: int | None = None
        self.inside = threading.Lock()

    def reset(self, item: int) -> str:
        if item > 9:
            raise GameError(f"there is no item {item}")
        self.item = item
        return f"item {item}"

    def step(self, action: str) -> Step:
        assert self.inside.acquire(blocking=False), "two steps of one session at once"
        try:
            if action == "crash":
                raise RuntimeError("a bug")
            if action == "wait":
                self.waiting.set()
                assert self.release.wait(timeout=30)
            return Step(f"{self.item}:{action}", 0.5, action == "end")
        finally:
            self.inside.release()

    def observation(self) -> str:
        return f"item {self.item}"

    def close(self) -> None:
        self.closed.append(self)
        if self.item == 9:
            raise RuntimeError("a bug at the very end")


@pytest.fixture
def echo() -> type[Echo]:
    """A class of its own for each test, so that what it counts is the test's."""
    return type(
        "EchoOfTest",
        (Echo,),
        {"closed": [], "waiting": threading.Event(), "release": threading.Event()},
    )


def spec_of(family: str, game: type[Echo], **changes: Any) -> EnvironmentSpec:
    spec = EnvironmentSpec(
        name="echo",
        health="This is environment Echo." if family == "id" else "ok",
        family="id" if family == "id" else "env_idx",
        item_field="data_idx" if family == "id" else "item_id",
        new_game=game,
        items=fixed_splits(range(5), range(5, 10)),
    )
    return replace(spec, **changes)


def test_id_family_answers_objects_and_reports_failures_with_status_200(
    serve_app: AppServer, echo: type[Echo]
) -> None:
    client = Client(serve_app(build_app(spec_of("id", echo))))
    assert client.get("/") == (200, "This is environment Echo.")
    assert client.post("/create") == (200, {"id": 0})
    assert client.post("/step", {"id": 0, "action": "x"}) == (
        200,
        {"error": "The environment 0 has not been reset: call reset first."},
    )
    assert client.post("/reset", {"id": 0, "data_idx": 3}) == (200, {"observation": "item 3"})
    assert client.post("/step", {"id": 0, "action": "hi"}) == (
        200,
        {"observation": "3:hi", "reward": 0.5, "done": False},
    )
    assert client.get("/observation?id=0") == (200, "item 3")
    assert client.post("/reset", {"id": 0, "data_idx": 77}) == (
        200,
        {"error": "there is no item 77"},
    )
    assert client.ok("/step", {"id": 0, "action": "end"})["done"] is True
    assert client.post("/step", {"id": 0, "action": "x"}) == (
        200,
        {"error": "The task with environment 0 has finished."},
    )
    assert client.post("/close", {"id": 0}) == (200, True)
    assert client.post("/close", {"id": 0}) == (200, False)
    assert client.post("/step", {"id": 0, "action": "x"}) == (
        200,
        {"error": "The id 0 is not valid."},
    )
    assert client.post("/step", {"id": 999, "action": "x"}) == (
        200,
        {"error": "The id 999 is not valid."},
    )


@pytest.mark.parametrize("character", ["ü", "\ud800"])
def test_an_exception_of_a_game_is_named_in_the_answer(
    serve_app: AppServer,
    echo: type[Echo],
    monkeypatch: pytest.MonkeyPatch,
    character: str,
) -> None:
    def step(game: Echo, action: str) -> Step:
        raise RuntimeError(f"no board for {character}\n{action}")

    # The messages are kept here: pytest-xdist cannot send captured logs with lone surrogates.
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(echo, "step", step)
    monkeypatch.setattr(logging.getLogger("envs.server"), "handle", records.append)
    client = Client(serve_app(build_app(spec_of("id", echo))))
    client.post("/create")
    client.post("/reset", {"id": 0, "data_idx": 1})
    answer = client.post("/step", {"id": 0, "action": "x"})
    shown = "?" if character == "\ud800" else character
    assert answer == (500, f"Internal Server Error: RuntimeError: no board for {shown} x")
    assert records[-1].exc_info is not None


def test_env_idx_family_answers_a_bare_id_and_reports_failures_with_status_500(
    serve_app: AppServer, echo: type[Echo]
) -> None:
    spec = spec_of(
        "env_idx", echo, reset_answer=lambda session: [session.current.observation, None]
    )
    client = Client(serve_app(build_app(spec)))
    assert client.get("/") == (200, "ok")
    assert client.post("/create") == (200, 0)
    assert client.post("/create") == (200, 1)
    assert client.get("/list_envs") == (200, [0, 1])
    status, text = client.post("/step", {"env_idx": 0, "action": "x"})
    assert (status, text[:21]) == (500, "Internal Server Error")
    assert client.post("/reset", {"env_idx": 0, "item_id": 1}) == (200, ["item 1", None])
    assert client.post("/reset", {"env_idx": 0, "item_id": 99999})[0] == 500
    assert client.post("/step", {"env_idx": 55, "action": "x"})[0] == 500
    assert client.get("/observation?env_idx=0") == (200, "item 1")
    assert client.post("/close", {"env_idx": 0}) == (200, True)
    assert client.get("/list_envs") == (200, [1])


@pytest.mark.parametrize("family", ["id", "env_idx"])
def test_a_malformed_body_is_422_with_the_place_of_the_mistake(
    serve_app: AppServer, echo: type[Echo], family: str
) -> None:
    client = Client(serve_app(build_app(spec_of(family, echo))))
    client.post("/create")

    def problems(method: str, path: str, body: bytes | None = None) -> list[dict[str, Any]]:
        status, text = client.send(method, path, body)
        assert status == 422, text
        return json.loads(text)["detail"]

    only_id = json.dumps({family: 0}).encode()
    assert problems("POST", "/step", only_id) == [
        {
            "type": "missing",
            "loc": ["body", "action"],
            "msg": "Field required",
            "input": {family: 0},
        }
    ]
    assert problems("POST", "/step") == [
        {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}
    ]
    assert problems("POST", "/step", b"{not json")[0]["loc"][0] == "body"
    assert problems("POST", "/step", b"[1, 2]")[0]["loc"] == ["body"]
    wrong = json.dumps({family: "zero", "action": 5}).encode()
    assert [entry["loc"] for entry in problems("POST", "/step", wrong)] == [
        ["body", family],
        ["body", "action"],
    ]
    assert problems("POST", "/reset", only_id)[0]["type"] == "missing"
    assert problems("GET", "/observation")[0]["loc"] == ["query", family]
    assert problems("GET", f"/observation?{family}=x")[0]["loc"] == ["query", family]


@pytest.mark.parametrize("family", ["id", "env_idx"])
def test_a_full_server_refuses_a_session_until_one_is_closed(
    serve_app: AppServer, echo: type[Echo], family: str
) -> None:
    client = Client(serve_app(build_app(spec_of(family, echo), max_sessions=2)))
    for _ in range(2):
        client.ok("/create")
    status, answer = client.post("/create")
    message = answer["error"] if family == "id" else answer
    assert status == (200 if family == "id" else 500)
    assert "2 live sessions" in message and "--max_sessions" in message
    assert client.post("/close", {family: 0}) == (200, True)
    assert client.ok("/create") in (2, {"id": 2})


def test_ids_are_never_given_twice(serve_app: AppServer, echo: type[Echo]) -> None:
    client = Client(serve_app(build_app(spec_of("id", echo))))
    seen = []
    for _ in range(20):
        seen.append(client.ok("/create")["id"])
        client.ok("/close", {"id": seen[-1]})
    assert seen == list(range(20))


@pytest.mark.bug("B31")
def test_unused_sessions_expire_and_their_games_are_closed(
    serve_app: AppServer, echo: type[Echo]
) -> None:
    now = [0.0]
    app = build_app(spec_of("id", echo), max_sessions=2, session_ttl=1000.0, clock=lambda: now[0])
    client = Client(serve_app(app))
    client.ok("/create")
    client.ok("/create")
    now[0] = 900.0
    client.ok("/reset", {"id": 1, "data_idx": 4})
    now[0] = 1001.0
    assert client.get("/list_envs") == (200, [1])
    assert len(echo.closed) == 1
    assert client.ok("/step", {"id": 0, "action": "x"}) == {"error": "The id 0 is not valid."}
    assert client.ok("/step", {"id": 1, "action": "x"})["observation"] == "4:x"
    now[0] = 2001.0
    assert client.ok("/create") == {"id": 2}
    assert client.get("/list_envs") == (200, [1, 2])
    now[0] = 2002.0
    assert client.get("/list_envs") == (200, [2])


def test_a_waiting_step_blocks_neither_other_sessions_nor_expires(
    serve_app: AppServer, echo: type[Echo]
) -> None:
    now = [0.0]
    url = serve_app(build_app(spec_of("id", echo), session_ttl=10.0, clock=lambda: now[0]))
    client = Client(url)
    for session in range(2):
        client.ok("/create")
        client.ok("/reset", {"id": session, "data_idx": session})
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(Client(url).ok, "/step", {"id": 0, "action": "wait"})
        assert echo.waiting.wait(timeout=30)
        assert client.ok("/step", {"id": 1, "action": "quick"})["observation"] == "1:quick"
        now[0] = 100.0
        assert client.get("/list_envs") == (200, [0])
        echo.release.set()
        assert slow.result()["observation"] == "0:wait"
    assert client.get("/list_envs") == (200, [0])


def test_requests_for_one_session_wait_for_each_other(
    serve_app: AppServer, echo: type[Echo]
) -> None:
    url = serve_app(build_app(spec_of("id", echo)))
    client = Client(url)
    client.ok("/create")
    client.ok("/reset", {"id": 0, "data_idx": 0})
    with ThreadPoolExecutor() as pool:
        first = pool.submit(Client(url).ok, "/step", {"id": 0, "action": "wait"})
        assert echo.waiting.wait(timeout=30)
        others = [pool.submit(Client(url).ok, "/step", {"id": 0, "action": "b"}) for _ in range(3)]
        closing = pool.submit(Client(url).ok, "/close", {"id": 0})
        while client.get("/list_envs") != (200, []):
            pass
        assert echo.closed == []
        echo.release.set()
        assert first.result()["observation"] == "0:wait"
        assert closing.result() is True
        answers = [other.result() for other in others]
    valid = {"observation": "0:b", "reward": 0.5, "done": False}
    assert all(answer in (valid, {"error": "The id 0 is not valid."}) for answer in answers)
    assert len(echo.closed) == 1


def test_a_bug_in_a_game_is_a_500_of_that_request_alone(
    serve_app: AppServer, echo: type[Echo]
) -> None:
    client = Client(serve_app(build_app(spec_of("id", echo))))
    client.ok("/create")
    client.ok("/reset", {"id": 0, "data_idx": 2})
    assert client.post("/step", {"id": 0, "action": "crash"})[0] == 500
    assert client.ok("/step", {"id": 0, "action": "x"})["observation"] == "2:x"


def test_a_game_that_fails_to_close_is_removed(serve_app: AppServer, echo: type[Echo]) -> None:
    client = Client(serve_app(build_app(spec_of("id", echo))))
    client.ok("/create")
    client.ok("/reset", {"id": 0, "data_idx": 9})
    assert client.ok("/close", {"id": 0}) is True
    assert client.get("/list_envs") == (200, [])


def test_invalid_characters_reach_the_game_as_replacement_characters(
    serve_app: AppServer, echo: type[Echo]
) -> None:
    client = Client(serve_app(build_app(spec_of("id", echo, max_action=100))))
    client.ok("/create")
    client.ok("/reset", {"id": 0, "data_idx": 0})
    answer = client.ok("/step", {"id": 0, "action": "a\x00b\x1b[2Jc\nd\te"})
    assert answer["observation"] == "0:a\ufffdb\ufffd[2Jc\nd\te"
    answer = client.ok("/step", {"id": 0, "action": "x" * 1_000_000})
    assert answer["observation"] == "0:" + "x" * 100
    assert client.ok("/step", {"id": 0, "action": "héllo ✓"})["observation"] == "0:héllo ✓"
    lone_surrogate = b'{"id": 0, "action": "\\ud800"}'
    assert client.send("POST", "/step", lone_surrogate)[0] == 422
    assert client.send("POST", "/step", b"x" * (9 * 1024 * 1024))[0] == 413
    assert Client(client.url).ok("/step", {"id": 0, "action": "x"})["observation"] == "0:x"


def test_games_are_closed_when_the_server_ends(serve_app: AppServer, echo: type[Echo]) -> None:
    app = build_app(spec_of("id", echo))
    client = Client(serve_app(app))
    for _ in range(3):
        client.ok("/create")
    serve_app.stop()
    assert len(echo.closed) == 3
