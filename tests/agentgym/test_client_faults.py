"""Every response that does not belong to the game is a failure that says where, what and why."""

import contextlib
import json
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from scripted_servers import Hang, HangUp, Reply, TextcraftStub, recorded, serving

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.connection import Connection, server_root
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.table import ENVIRONMENTS, environment
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.errors import UserError

TEXTCRAFT = ENVIRONMENTS["textcraft"]
HASTY = EnvPoolSettings(connect_timeout=2.0, read_timeout=0.2)
PAGE = Reply("<!DOCTYPE html><html><body>nginx</body></html>", 200, "text/html")


def step(observation: object = "x", reward: object = 0, done: object = False) -> Reply:
    return Reply(json.dumps({"observation": observation, "reward": reward, "done": done}))


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (Hang, FailureKind.TIMEOUT, "no answer within 0.2 s"),
        (HangUp, FailureKind.CONNECTION, "closed connection without response"),
        (Reply("Internal Server Error", 500), FailureKind.STATUS, "HTTP 500: Internal Server"),
        (Reply("busy", 503), FailureKind.STATUS, "HTTP 503: busy"),
        (Reply("", 302), FailureKind.STATUS, "HTTP 302"),
        (Reply('{"error": "boom"}'), FailureKind.ERROR_ANSWER, "boom"),
        (Reply('{"observation": "x", '), FailureKind.MALFORMED, "broken JSON"),
        (Reply(""), FailureKind.MALFORMED, "broken JSON"),
        (Reply('{"reward": 0, "done": false}'), FailureKind.MALFORMED, "no 'observation'"),
        (Reply('{"observation": "x", "reward": 0}'), FailureKind.MALFORMED, "no 'done'"),
        (Reply('{"observation": "x", "done": true}'), FailureKind.MALFORMED, "no 'reward'"),
        (Reply("[1, 2]"), FailureKind.MALFORMED, "no 'observation'"),
        (step(observation=None), FailureKind.MALFORMED, "wrong types"),
        (step(done="yes"), FailureKind.MALFORMED, "wrong types"),
        (step(reward=None), FailureKind.MALFORMED, "wrong types"),
        (step(reward="1"), FailureKind.MALFORMED, "wrong types"),
        (step(reward=7), FailureKind.MALFORMED, r"reward 7 is outside 0\.\.1"),
        (step(reward=float("nan")), FailureKind.MALFORMED, "reward is nan"),
        (PAGE, FailureKind.NOT_AGENTGYM, "HTML instead of JSON"),
        (Reply("[" * 100_000), FailureKind.MALFORMED, "broken JSON"),
        # A string of quotes that never ends; time must not grow with its square.
        (Reply("[" * 101 + '"' + '\\"' * 10**6), FailureKind.MALFORMED, "broken JSON"),
        (Reply("[" * 5000 + "]" * 5000), FailureKind.MALFORMED, "broken JSON"),
        (Reply('{"a":' * 5000 + "1" + "}" * 5000), FailureKind.MALFORMED, "broken JSON"),
        (Reply("[" * 90 + "]" * 90), FailureKind.MALFORMED, "no 'observation'"),
        (Reply("9" * 10_000), FailureKind.MALFORMED, "broken JSON"),
        (step(reward=10**400), FailureKind.MALFORMED, "too large"),
        (step(reward=-(10**400)), FailureKind.MALFORMED, "too large"),
        (step(reward=float("inf")), FailureKind.MALFORMED, "reward is inf"),
        (Reply("bad gateway", 502), FailureKind.CONNECTION, "gateway does not reach the server"),
        (Reply("timeout", 504), FailureKind.CONNECTION, "gateway does not reach the server"),
    ],
)
def test_a_bad_answer_to_step_is_a_typed_failure(
    fault: Reply | type[Exception], kind: FailureKind, message: str
) -> None:
    stub = TextcraftStub()
    heard = []
    with serving(stub) as url:
        session = Session(TEXTCRAFT, url, HASTY, heard.append)
        session.create()
        session.reset(0)
        stub.faults["step"] = fault
        with pytest.raises(EnvironmentFailure, match=message) as caught:
            session.step("inventory")
        assert caught.value.kind is kind
        assert str(caught.value).startswith(f"textcraft at {url}: POST /step: ")
        assert heard == [caught.value]


def test_an_observation_that_is_full_of_brackets_is_read() -> None:
    stub = TextcraftStub()
    brackets = "[{" * 500 + '\\" ]'
    with serving(stub) as url:
        session = Session(TEXTCRAFT, url)
        session.create()
        session.reset(0)
        assert session.step(brackets).observation == brackets


def test_a_lone_surrogate_in_an_observation_is_replaced() -> None:
    stub = TextcraftStub()
    stub.faults["step"] = step("a\ud800b")
    stub.faults["reset"] = Reply(r'{"observation": "\ud800"}')
    with serving(stub) as url:
        session = Session(TEXTCRAFT, url)
        session.create()
        assert session.reset(0) == "?"
        assert session.step("x").observation == "a?b"


@contextlib.contextmanager
def raw_server(
    respond: Callable[[socket.socket], None], times: int = 1, heads: list[bytes] | None = None
) -> Iterator[str]:
    """A server that answers the first request of a connection with any bytes.

    `heads` receives the headers of the requests.
    """
    heads = [] if heads is None else heads

    def serve() -> None:
        with contextlib.suppress(OSError):
            for _ in range(times):
                connection, _ = listening.accept()
                with connection:
                    head = b""
                    while b"\r\n\r\n" not in head:
                        head += connection.recv(1 << 16)
                    heads.append(head)
                    # Closing with unread bytes would reset the connection under the response.
                    length = re.search(rb"Content-Length: (\d+)", head, re.IGNORECASE)
                    left = int(length[1]) - len(head.split(b"\r\n\r\n", 1)[1]) if length else 0
                    while left > 0:
                        left -= len(connection.recv(left))
                    respond(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(5)


def endless(connection: socket.socket, head: bytes, chunk: bytes, pause: float = 0.0) -> None:
    connection.sendall(head)
    while True:
        connection.sendall(chunk)
        time.sleep(pause)


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MEGABYTE = b"x" * (1 << 20)


@pytest.mark.parametrize(
    ("head", "chunk", "pause"),
    [
        (HEAD + b"Content-Length: 1000\r\n\r\n", b"x", 0.05),
        (HEAD, b"X-More: 1\r\n", 0.05),
        (HEAD + b"X-Long: ", b"x", 0.05),
        (b"", b"H", 0.05),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
        (CHUNKED, b"1\r\nx\r\n", 0.05),
    ],
)
def test_a_slow_response_has_a_total_deadline(head: bytes, chunk: bytes, pause: float) -> None:
    with raw_server(lambda connection: endless(connection, head, chunk, pause)) as url:
        began = time.monotonic()
        with pytest.raises(EnvironmentFailure, match=r"no answer within 0\.2 s") as caught:
            Session(TEXTCRAFT, url, HASTY).create()
        assert caught.value.kind is FailureKind.TIMEOUT
        assert time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"Content-Length: 1073741824\r\n\r\n",
        HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
        HEAD + b"\r\n",
        CHUNKED + b"ffffffffffff\r\n",
    ],
)
def test_a_response_has_a_maximum_size(head: bytes) -> None:
    with raw_server(lambda connection: endless(connection, head, MEGABYTE)) as url:
        tracemalloc.start()
        with pytest.raises(EnvironmentFailure, match="longer than 16 MiB") as caught:
            Session(TEXTCRAFT, url).create()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert caught.value.kind is FailureKind.MALFORMED and caught.value.retryable
        assert peak < 40 << 20


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Content-Length: 100\r\n\r\n12",
        HEAD + b"Content-Length: 100\r\n\r\n",
        CHUNKED + b"5\r\n12",
        CHUNKED + b"-5\r\n12",
        CHUNKED + b"zz\r\n12",
        b"HTTP/1.1 abc\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00\xff\x00\xff",
        HEAD + b"X: 1\r\n" * 200 + b"\r\n",
        HEAD + b"X-Long: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
)
def test_a_response_that_is_cut_off_or_no_http_is_a_lost_connection(answer: bytes) -> None:
    with raw_server(lambda connection: connection.sendall(answer)) as url:
        with pytest.raises(EnvironmentFailure) as caught:
            Session(TEXTCRAFT, url).create()
        assert caught.value.kind is FailureKind.CONNECTION and caught.value.retryable


def test_a_response_that_comes_twice_is_not_taken_for_the_next_one() -> None:
    answers = iter([b"1", b"2"])

    def respond(connection: socket.socket) -> None:
        one = HEAD + b"Content-Length: 1\r\n\r\n" + next(answers)
        connection.sendall(one)
        time.sleep(0.05)
        connection.sendall(one)

    with raw_server(respond, times=2) as url:
        connection = Connection(TEXTCRAFT, url, HASTY)
        assert connection.call("GET", "/").text == "1"
        time.sleep(0.1)
        assert connection.call("GET", "/").text == "2"


def test_a_reset_of_another_session_is_malformed() -> None:
    stub = TextcraftStub()
    stub.faults["reset"] = Reply('{"id": 5, "observation": "x"}')
    with serving(stub) as url:
        session = Session(TEXTCRAFT, url)
        session.create()
        with pytest.raises(EnvironmentFailure, match="another session") as caught:
            session.reset(0)
    assert caught.value.kind is FailureKind.MALFORMED


def test_the_key_of_the_environment_is_sent_with_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MANUS_JAX_ENV_KEY", "s3cret")
    received: list[bytes] = []
    answer = HEAD + b"Content-Length: 1\r\n\r\n7"
    stub = TextcraftStub()
    for status in (401, 403):
        stub.faults[""] = Reply("Unauthorized", status)
        with (
            serving(stub) as url,
            pytest.raises(EnvironmentFailure, match="rejects the key in MANUS_JAX_ENV_KEY"),
        ):
            Connection(TEXTCRAFT, url, HASTY).check()
    with raw_server(lambda connection: connection.sendall(answer), heads=received) as url:
        assert Connection(TEXTCRAFT, url, HASTY).call("POST", "/create", {}).text == "7"
    assert b"Authorization: Bearer s3cret\r\n" in received[0]
    monkeypatch.delenv("MANUS_JAX_ENV_KEY")
    with (
        serving(stub) as url,
        pytest.raises(EnvironmentFailure, match="requires a key; set MANUS_JAX_ENV_KEY"),
    ):
        Connection(TEXTCRAFT, url, HASTY).check()


@pytest.mark.parametrize("key", ["two words", "line\r\nX-Other: 1", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_a_mistake_of_the_user(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANUS_JAX_ENV_KEY", key)
    with pytest.raises(UserError, match="MANUS_JAX_ENV_KEY must consist of printable ASCII"):
        Connection(TEXTCRAFT, "http://127.0.0.1:1", HASTY)


@pytest.mark.parametrize(
    "answer", ["null", "{}", "[]", '"7"', "true", '{"id": null}', '{"id": NaN}']
)
def test_create_without_an_id_is_malformed(answer: str) -> None:
    stub = TextcraftStub()
    stub.faults["create"] = Reply(answer)
    with serving(stub) as url, pytest.raises(EnvironmentFailure) as caught:
        Session(TEXTCRAFT, url).create()
    assert caught.value.kind is FailureKind.MALFORMED


@pytest.mark.parametrize("answer", ["null", "{}", "[]", '{"observation": 3}'])
def test_reset_without_an_observation_is_malformed(answer: str) -> None:
    stub = TextcraftStub()
    stub.faults["reset"] = Reply(answer)
    with serving(stub) as url:
        session = Session(TEXTCRAFT, url)
        session.create()
        with pytest.raises(EnvironmentFailure) as caught:
            session.reset(0)
    assert caught.value.kind is FailureKind.MALFORMED


def test_a_server_that_dies_in_mid_episode_is_a_lost_connection() -> None:
    with serving(TextcraftStub()) as url:
        session = Session(TEXTCRAFT, url)
        session.create()
        session.reset(0)
        session.step("inventory")
    session.disconnect()
    with pytest.raises(EnvironmentFailure, match=r"refused.*is the server running") as caught:
        session.step("inventory")
    assert caught.value.kind is FailureKind.CONNECTION


def test_a_port_without_a_listener_is_a_lost_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EnvironmentFailure, match="refused") as caught:
            Session(TEXTCRAFT, url).create()
    assert caught.value.kind is FailureKind.CONNECTION


@pytest.mark.parametrize("host", ["nowhere.invalid", "with space", "ü" * 80])
def test_a_host_that_is_not_there_is_a_lost_connection(host: str) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        Session(TEXTCRAFT, f"http://{host}:9").create()
    assert caught.value.kind is FailureKind.CONNECTION


def test_a_long_answer_is_quoted_in_short() -> None:
    stub = TextcraftStub()
    stub.faults["create"] = Reply("x" * 100_000, 500)
    with serving(stub) as url, pytest.raises(EnvironmentFailure) as caught:
        Session(TEXTCRAFT, url).create()
    assert len(str(caught.value)) < 400
    assert "100000 characters" in str(caught.value)


def test_babyai_ends_on_the_completed_text_though_done_is_false() -> None:
    # The real server leaves done false for a success worth 0.5 or less, and its score can then
    # be farmed with invalid actions.
    def babyai(method: str, path: str, body: object) -> Reply:
        answer = {"observation": "You see.\n The task is completed.", "reward": 0.44, "score": 0.88}
        return Reply('{"id": 0}' if path == "/create" else json.dumps({**answer, "done": False}))

    with serving(babyai) as url:
        session = Session(ENVIRONMENTS["babyai"], url)
        session.create()
        session.reset(0)
        result = session.step("go to red ball 1")
        assert (result.reward, result.done, session.success) == (0.44, True, True)


def test_maze_25_of_the_real_server_is_an_unknown_item() -> None:
    def maze(method: str, path: str, body: object) -> Reply:
        return Reply('{"id": 0}' if path == "/maze/create" else '{"error": ""}')

    with serving(maze) as url:
        session = Session(ENVIRONMENTS["maze"], url)
        session.create()
        with pytest.raises(EnvironmentFailure, match=r"item 25 is outside 0\.\.24") as caught:
            session.reset(25)
        assert caught.value.kind is FailureKind.ITEM
        with pytest.raises(EnvironmentFailure) as caught:
            session.reset(3)
        assert caught.value.kind is FailureKind.ERROR_ANSWER


def test_calls_on_a_closed_session_are_mistakes_of_the_program() -> None:
    with serving(TextcraftStub()) as url:
        session = Session(TEXTCRAFT, url)
        session.create()
        session.close()
        session.close()
        with pytest.raises(RuntimeError, match="closed or not created"):
            session.reset(0)


@pytest.mark.parametrize("name", ["textcraft", "babyai", "sciworld"])
def test_a_family_a_close_that_is_missing_is_a_failure(name: str) -> None:
    def server(method: str, path: str, body: object) -> Reply:
        return Reply('{"id": 0}') if path == "/create" else Reply('{"detail": "Not Found"}', 404)

    with serving(server) as url:
        session = Session(ENVIRONMENTS[name], url)
        session.create()
        with pytest.raises(EnvironmentFailure, match="HTTP 404"):
            session.close()


def test_the_check_of_a_server_refuses_a_web_page_and_a_missing_route() -> None:
    with (
        serving(lambda *request: PAGE) as url,
        pytest.raises(EnvironmentFailure, match="not an AgentGym server"),
    ):
        Connection(TEXTCRAFT, url, EnvPoolSettings()).check()
    with serving(recorded("weather")) as url:
        Connection(ENVIRONMENTS["weather"], url, EnvPoolSettings()).check()
        with pytest.raises(EnvironmentFailure, match="does not serve maze"):
            Connection(ENVIRONMENTS["maze"], url, EnvPoolSettings()).check_routes()


def test_the_check_of_a_server_refuses_one_that_answers_everything() -> None:
    with (
        serving(lambda *request: Reply("{}")) as url,
        pytest.raises(EnvironmentFailure, match="a step without fields was accepted"),
    ):
        Connection(TEXTCRAFT, url, EnvPoolSettings()).check_routes()


def test_the_check_of_a_server_notices_another_environments_fields() -> None:
    def sqlgym(method: str, path: str, body: object) -> Reply:
        missing = [{"type": "missing", "loc": ["body", key]} for key in ("env_idx", "action")]
        return Reply('"ok"') if path == "/" else Reply(json.dumps({"detail": missing}), 422)

    with serving(sqlgym) as url:
        Connection(ENVIRONMENTS["sqlgym"], url, EnvPoolSettings()).check_routes()
        with pytest.raises(EnvironmentFailure, match="step wants env_idx, action, but textcraft"):
            Connection(TEXTCRAFT, url, EnvPoolSettings()).check_routes()


@pytest.mark.bug("B33")
@pytest.mark.parametrize(
    ("address", "root"),
    [
        ("http://node:4000", "http://node:4000"),
        ("http://node:4000/wordle/", "http://node:4000"),
        ("https://gym.example.org/games/wordle", "https://gym.example.org/games"),
        ("node", "http://node:36001"),
        ("node:4000", "http://node:4000"),
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_addresses_as_people_write_them(address: str, root: str) -> None:
    assert server_root(environment("wordle"), address) == root


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ftp://node:1",
        "http://",
        "http://node:eighty",
        "http://node:99999",
        "http://user:password@node:1",
        "http://node:1/?key=1",
    ],
)
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"wordle: .* is not a server; write http://HOST:PORT"):
        server_root(environment("wordle"), address)


def test_an_unknown_environment_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown environment 'textcarft'; did you mean"):
        environment("textcarft")


@pytest.mark.parametrize("name", ["sciworld", "alfworld", "wordle"])
def test_a_first_observation_that_is_no_text_is_malformed(name: str) -> None:
    row = ENVIRONMENTS[name]
    answers = {
        "create": {"id": 3},
        "reset": {"observation": 3, "task_description": "x", "available_actions": ["look"]},
        "filtered_vocab": ["arise"],
    }

    def server(method: str, path: str, body: object) -> Reply:
        route = path.removeprefix(row.prefix).strip("/").partition("?")[0]
        return Reply(json.dumps(answers[route]))

    with serving(server) as url:
        session = Session(row, url)
        session.create()
        with pytest.raises(EnvironmentFailure) as caught:
            session.reset(0)
        assert caught.value.kind is FailureKind.MALFORMED
