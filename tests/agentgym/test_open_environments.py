"""All errors in the choice of servers are reported before anything starts."""

import pytest
from scripted_servers import Answer, Reply, recorded, serving

from manus_jax.agentgym import environments
from manus_jax.agentgym.environments import check_items, open_environments
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.servers.processes import ServerSetupError


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(commands: list, *arguments: object) -> object:
        assert not commands, "a server was started before the setting was found wrong"
        return original(commands, *arguments)

    original = environments.ServerSupervisor
    monkeypatch.setattr(environments, "ServerSupervisor", refuse)


def opened(servers: dict, **options: int) -> None:
    with open_environments(servers, **options):
        pass


def weather() -> Answer:
    """The recorded server, with FastAPI's answer to a step without fields."""

    def answer(method: str, path: str, body: object) -> Reply:
        return Reply("{}", 422) if body == {} else real(method, path, body)

    real = recorded("weather")
    return answer


def test_an_unknown_environment_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"unknown environment 'minecraft'.*\(known: textcraft, "):
        opened({"textcraft": "embedded", "minecraft": "embedded"})


def test_an_environment_without_embedded_server_is_an_error_that_lists_the_embedded_ones() -> None:
    with pytest.raises(ValueError, match=r"'webarena' has no embedded server.*babyai.*textcraft"):
        opened({"webarena": "embedded"})


def test_no_servers_and_no_number_of_servers_are_refused() -> None:
    with pytest.raises(ValueError, match='textcraft: no servers; write "embedded" or a list'):
        opened({"textcraft": []})
    with pytest.raises(ValueError, match="servers_per_env must be at least 1, not 0"):
        opened({"textcraft": "embedded"}, servers_per_env=0)


def test_invalid_urls_are_refused() -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        opened({"textcraft": ["gopher://hole"]})


@pytest.mark.bug("B29")
def test_all_servers_that_cannot_be_used_are_named_at_once() -> None:
    page = Reply("<html>It works!</html>", 200, "text/html")
    with serving(weather()) as good, serving(lambda *request: page) as web:
        with serving(weather()) as dead:
            pass
        with pytest.raises(ServerSetupError) as caught:
            opened({"weather": [good, dead], "sqlgym": [web], "textcraft": "embedded"})
    message = str(caught.value)
    assert f"weather at {dead}: GET /: " in message
    assert "refused" in message
    assert f"sqlgym at {web}: GET /: not an AgentGym server" in message
    assert f"weather at {good}" not in message


def test_given_servers_are_played_and_nothing_is_started() -> None:
    with serving(weather()) as url, open_environments({"weather": url}) as pool:
        with pool.lease("weather") as session:
            assert session.reset(0).startswith("Now new trial starts.")
        assert pool.environments == ("weather",)


def test_servers_with_other_items_are_refused_with_advice() -> None:
    with serving(recorded("maze")) as url, pytest.raises(ServerSetupError) as caught:
        check_items({"maze": [url]}, EnvPoolSettings(), "data.train_files is empty")
    message = str(caught.value)
    assert f"data.train_files is empty: the server {url} has other items of maze" in message
    assert "e.g. maze_0 and maze_1 (AgentGym has 0..24)" in message
    assert "python -m envs.items maze --out DIR" in message


def test_environments_with_the_same_items_everywhere_need_no_question() -> None:
    nowhere = ["http://127.0.0.1:1"]
    check_items({"babyai": nowhere, "sciworld": nowhere}, EnvPoolSettings(), "the oracle plays")
    with pytest.raises(
        ServerSetupError, match=r"the oracle plays: this project has no tasks of mov"
    ):
        check_items({"movie": nowhere}, EnvPoolSettings(), "the oracle plays")
    with pytest.raises(ServerSetupError, match=r"maze at http://127\.0\.0\.1:1: GET /: .*refused"):
        check_items({"maze": nowhere}, EnvPoolSettings(), "the oracle plays")


@pytest.mark.parametrize("urls", [5, None, [5], {"a": "b"}, [["http://a:1"]], [None]])
def test_values_that_are_not_lists_of_urls_are_refused(urls: object) -> None:
    with pytest.raises(ValueError, match=r"maze: .* is not a list of URLs"):
        opened({"maze": urls})
