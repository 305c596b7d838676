"""Whatever is not an answer of the game becomes a failure that says where, what and why."""

import json
import socket

import pytest
from scripted_servers import Hang, HangUp, Reply, TextcraftStub, recorded, serving

from manus_jax.agentgym.client import Connection, Session, server_root
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.table import ENVIRONMENTS, environment
from manus_jax.config.server_settings import EnvPoolSettings

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


@pytest.mark.parametrize("answer", ["null", "{}", "[]", '"7"', "true", '{"id": null}'])
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


def test_a_port_where_nobody_listens_is_a_lost_connection() -> None:
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


@pytest.mark.parametrize("address", ["", "ftp://node:1", "http://", "http://node:eighty"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"wordle: .* is not a server; write http://HOST:PORT"):
        server_root(environment("wordle"), address)


def test_an_unknown_environment_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown environment 'textcarft'; did you mean"):
        environment("textcarft")
