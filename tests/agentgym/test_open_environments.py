"""Every mistake in the choice of servers is found before anything starts."""

import pytest
from scripted_servers import Answer, Reply, recorded, serving

from manus_jax.agentgym import environments
from manus_jax.agentgym.environments import open_environments
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


def test_an_environment_we_do_not_serve_says_which_are_embedded() -> None:
    with pytest.raises(ValueError, match=r"'webarena' has no embedded server.*babyai.*textcraft"):
        opened({"webarena": "embedded"})


def test_no_servers_and_no_number_of_servers_are_refused() -> None:
    with pytest.raises(ValueError, match='textcraft: no servers; write "embedded" or a list'):
        opened({"textcraft": []})
    with pytest.raises(ValueError, match="servers_per_env must be at least 1, not 0"):
        opened({"textcraft": "embedded"}, servers_per_env=0)


def test_what_is_no_url_is_refused() -> None:
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
