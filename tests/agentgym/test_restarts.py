"""No episode is continued, closed or scored in a session of a restarted server."""

import contextlib
import socket
import threading
import time

import pytest
from scripted_servers import Reply, RestartableServer, serving

from manus_jax.agentgym import pool as pool_module
from manus_jax.agentgym.client import Session
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import ENVIRONMENTS, EnvironmentRow
from manus_jax.config.server_settings import EnvPoolSettings

LAST = "<answer>last</answer> with Action Input: ```last```"
SOON = EnvPoolSettings(patience=5.0, first_retry=0.01)
ROWS = list(ENVIRONMENTS.values())


def name(row: EnvironmentRow) -> str:
    return row.name


def leased(pool: EnvironmentPool, row: EnvironmentRow, stack: contextlib.ExitStack) -> Session:
    """A session in the middle of an episode of item 3."""
    session = stack.enter_context(pool.lease(row.name))
    assert "item 3" in session.reset(3)
    assert "item 3" in session.step("look").observation
    return session


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_session_is_not_continued_in_the_game_of_another_client(row: EnvironmentRow) -> None:
    server = RestartableServer(row)
    count = row.sessions_per_server or 4
    with (
        serving(server, server.connections) as url,
        EnvironmentPool({row.name: [url]}, SOON) as pool,
        contextlib.ExitStack() as stack,
    ):
        interrupted = [leased(pool, row, stack) for _ in range(count)]
        server.restart()
        for _ in range(count):
            other = Session(row, url)
            other.create()
            other.reset(9)
        games = dict(server.items)
        for session in interrupted:
            with pytest.raises(EnvironmentFailure) as caught:
                session.step(LAST)
            assert caught.value.kind is FailureKind.RESTARTED and caught.value.retryable
            assert session.episode_reward == 0.0
        stack.close()
        assert server.items == games  # nothing of the other client was closed either
        with pool.lease(row.name) as session:
            session.reset(5)
            assert "item 5" in session.step(LAST).observation


COUNTING = [row for row in ROWS if not row.recycles_ids and row.sessions_per_server is None]


@pytest.mark.parametrize("row", COUNTING, ids=name)
def test_a_restart_that_breaks_no_connection_is_noticed_by_the_ids(row: EnvironmentRow) -> None:
    server = RestartableServer(row)
    with (
        serving(server, server.connections) as url,
        EnvironmentPool({row.name: [url]}, SOON) as pool,
        contextlib.ExitStack() as stack,
    ):
        interrupted = [leased(pool, row, stack) for _ in range(4)]
        server.restart(breaks_connections=False)
        with contextlib.ExitStack() as later:
            for _ in range(4):
                leased(pool, row, later)
            for session in interrupted:
                with pytest.raises(EnvironmentFailure):
                    session.step(LAST)


def test_two_clients_of_one_sqlgym_server_are_never_scored_in_each_others_game() -> None:
    """All eight ids are in use: the server gives the ids of one client to the other."""
    row = ENVIRONMENTS["sqlgym"]
    server = RestartableServer(row)
    with (
        serving(server, server.connections) as url,
        EnvironmentPool({"sqlgym": [url]}, SOON) as ours,
        EnvironmentPool({"sqlgym": [url]}, SOON) as theirs,
        contextlib.ExitStack() as stack,
    ):
        first = stack.enter_context(ours.lease("sqlgym"))
        for _ in range(7):
            stack.enter_context(ours.lease("sqlgym"))
        second = stack.enter_context(theirs.lease("sqlgym"))
        assert first.id == second.id
        first.reset(3)
        second.reset(9)
        with pytest.raises(EnvironmentFailure, match="another client plays in session") as caught:
            first.step(LAST)
        assert caught.value.retryable and first.episode_reward == 0.0 and not first.success
        assert second.step(LAST).done and second.success


def test_an_idle_session_of_a_restarted_server_is_not_used_again() -> None:
    row = ENVIRONMENTS["academia"]
    server = RestartableServer(row)
    with serving(server, server.connections) as url, EnvironmentPool({"academia": [url]}) as pool:
        with pool.lease("academia") as session:
            session.reset(3)
        server.restart()
        Session(row, url).create()
        with pool.lease("academia") as session:
            assert session.id == 1
        assert pool.counters() == {"academia/leases": 2}


def test_a_broken_connection_of_one_session_does_not_invalidate_the_others() -> None:
    row = ENVIRONMENTS["textcraft"]
    server = RestartableServer(row)
    with (
        serving(server, server.connections) as url,
        EnvironmentPool({"textcraft": [url]}) as pool,
        contextlib.ExitStack() as stack,
    ):
        first, second = (leased(pool, row, stack) for _ in range(2))
        first.disconnect()
        assert first.step(LAST).done and second.step(LAST).done


def test_the_observed_connection_is_kept_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes idle connections, like uvicorn after 5 s, has not restarted."""
    monkeypatch.setattr(pool_module, "PING_SECONDS", 0.05)
    row = ENVIRONMENTS["textcraft"]
    server = RestartableServer(row)
    with (
        serving(server, server.connections, idle_limit=0.5) as url,
        EnvironmentPool({"textcraft": [url]}) as pool,
        pool.lease("textcraft") as session,
    ):
        session.reset(3)
        session.disconnect()
        time.sleep(1.0)
        assert session.step(LAST).done


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "Connection: close"])
def test_a_server_without_persistent_connections_is_judged_by_failed_calls(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "PING_SECONDS", 0.02)
    row = ENVIRONMENTS["textcraft"]
    server = RestartableServer(row)
    with (
        serving(server, server.connections, closes=protocol) as url,
        EnvironmentPool({"textcraft": [url]}) as pool,
        pool.lease("textcraft") as first,
        pool.lease("textcraft") as second,
    ):
        first.reset(3)
        second.reset(3)
        time.sleep(0.2)
        assert first.step("look").observation == "item 3"
        server.down = True
        with pytest.raises(EnvironmentFailure, match="is the server running"):
            first.step("look")
        server.restart()
        with pytest.raises(EnvironmentFailure, match="the server has restarted"):
            second.step(LAST)


def test_a_restart_without_persistent_connections_is_noticed_between_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "PING_SECONDS", 0.02)
    row = ENVIRONMENTS["textcraft"]
    before, after = RestartableServer(row), RestartableServer(row)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(before, before.connections, closes="HTTP/1.0"))
        pool = EnvironmentPool({"textcraft": [url]})
        with pool, pool.lease("textcraft") as session:
            session.reset(3)
            time.sleep(0.2)
            stack.close()
            time.sleep(0.5)
            port = int(url.rpartition(":")[2])
            with serving(after, after.connections, closes="HTTP/1.0", port=port):
                other = Session(row, url)
                other.create()
                other.reset(9)
                with pytest.raises(EnvironmentFailure, match="the server has restarted"):
                    session.step(LAST)


def test_a_restart_behind_a_gateway_is_noticed_between_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "PING_SECONDS", 0.02)
    row = ENVIRONMENTS["textcraft"]
    server, away = RestartableServer(row), threading.Event()

    def gateway(method: str, path: str, body: object) -> Reply:
        return Reply("Bad Gateway", 502) if away.is_set() else server(method, path, body)

    with (
        serving(gateway) as url,
        EnvironmentPool({"textcraft": [url]}) as pool,
        pool.lease("textcraft") as session,
    ):
        session.reset(3)
        away.set()
        time.sleep(0.3)
        away.clear()
        server.restart(breaks_connections=False)
        other = Session(row, url)
        other.create()
        other.reset(9)
        with pytest.raises(EnvironmentFailure, match="the server has restarted"):
            session.step(LAST)


def test_a_port_that_closes_every_connection_is_put_aside() -> None:
    """Another program at the address: there is no busy loop, and the message says what happens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted = []

        def close_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    accepted.append(connection.close())

        threading.Thread(target=close_all, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        settings = EnvPoolSettings(patience=0.5, first_retry=0.2)
        with (
            EnvironmentPool({"textcraft": [url]}, settings) as pool,
            pytest.raises(EnvironmentFailure, match=r"no free session within 0\.5 s; .* failed"),
            pool.lease("textcraft"),
        ):
            pass
    assert len(accepted) < 30
