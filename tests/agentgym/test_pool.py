"""Leases are exclusive, spread over healthy servers and released; waiting for them is bounded."""

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pools import JumpingClock, pool_of, winning
from retried import played
from scripted_servers import Reply, TextcraftStub, recorded, serving

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.server_settings import EnvPoolSettings


@pytest.mark.bug("B31")
def test_a_lease_is_a_session_that_is_closed_at_the_end(stub: TextcraftStub, url: str) -> None:
    with pool_of([url]) as pool:
        with pool.lease("textcraft") as session:
            assert session.reset(7) == "task 7"
            assert stub.live == {0}
        assert stub.live == set()
        assert pool.counters() == {"textcraft/leases": 1}


def test_a_lease_left_by_an_error_of_the_caller_is_closed_too(
    stub: TextcraftStub, url: str
) -> None:
    with pool_of([url]) as pool:
        with pytest.raises(ZeroDivisionError), pool.lease("textcraft") as session:
            session.reset(0)
            raise ZeroDivisionError
        assert stub.live == set()


def test_leases_go_to_the_server_with_the_fewest() -> None:
    stubs = [TextcraftStub() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        pool = pool_of([stack.enter_context(serving(stub)) for stub in stubs])
        for _ in range(9):
            stack.enter_context(pool.lease("textcraft"))
        assert [len(stub.live) for stub in stubs] == [3, 3, 3]


@pytest.mark.bug("B26")
def test_no_id_is_ever_leased_twice_at_once_under_64_threads() -> None:
    stubs = [TextcraftStub(), TextcraftStub()]
    in_use: set[tuple[str, object]] = set()
    guard = threading.Lock()

    with serving(stubs[0]) as a, serving(stubs[1]) as b:
        pool = EnvironmentPool({"textcraft": [a, b]}, EnvPoolSettings(sessions_per_server=16))

        def episode(number: int) -> float:
            with pool.lease("textcraft") as session:
                key = (session.root, session.id)
                with guard:
                    assert key not in in_use
                    in_use.add(key)
                reward = winning(session)
                with guard:
                    in_use.remove(key)
                return reward

        with ThreadPoolExecutor(64) as threads:
            assert list(threads.map(episode, range(256))) == [1.0] * 256
        assert pool.counters() == {"textcraft/leases": 256}
        pool.close()
    assert [stub.live for stub in stubs] == [set(), set()]


def test_the_ninth_sqlgym_session_waits_instead_of_sharing_an_id() -> None:
    # The real server knows eight ids and hands out the first again, which scored right answers
    # against another client's question.
    with serving(recorded("sqlgym")) as url:
        pool = EnvironmentPool({"sqlgym": [url]})
        eight = [pool.lease("sqlgym") for _ in range(8)]
        ids = [lease.__enter__().id for lease in eight]
        assert len(set(ids)) == 8
        ninth: list[object] = []

        def wait_for_room() -> None:
            with pool.lease("sqlgym") as session:
                ninth.append(session.id)

        thread = threading.Thread(target=wait_for_room)
        thread.start()
        while "sqlgym/refusals/duplicate_id" not in pool.counters():
            time.sleep(0.001)
        assert ninth == []
        eight[5].__exit__(None, None, None)
        thread.join()
        assert ninth == [ids[5]]


def test_a_crowd_shares_the_eight_sqlgym_sessions_one_at_a_time() -> None:
    with serving(recorded("sqlgym")) as url:
        pool = EnvironmentPool({"sqlgym": [url]})
        in_use: set[object] = set()
        guard = threading.Lock()
        barrier = threading.Barrier(8)

        def episode(number: int) -> None:
            with pool.lease("sqlgym") as session:
                with guard:
                    assert session.id not in in_use
                    in_use.add(session.id)
                barrier.wait()
                with guard:
                    in_use.remove(session.id)

        with ThreadPoolExecutor(24) as threads:
            list(threads.map(episode, range(48)))
        assert pool.counters()["sqlgym/leases"] == 48


def test_a_server_that_refuses_a_third_session_is_full_and_not_failing(
    stub: TextcraftStub, url: str
) -> None:
    pool = EnvironmentPool({"textcraft": [url]})
    first, second = pool.lease("textcraft"), pool.lease("textcraft")
    first.__enter__()
    second.__enter__()
    stub.faults["create"] = Reply('{"error": "The server already has 2 live sessions."}')
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(played(pool, "textcraft", winning)))
    thread.start()
    while "textcraft/refusals/error_answer" not in pool.counters():
        time.sleep(0.001)
    assert rewards == []
    stub.faults.clear()
    first.__exit__(None, None, None)
    thread.join()
    assert rewards == [1.0]
    second.__exit__(None, None, None)
    assert pool.counters() == {"textcraft/leases": 3, "textcraft/refusals/error_answer": 1}


def test_an_id_in_use_is_refused_and_another_server_asked() -> None:
    ids = iter(range(100))
    ring = lambda method, path, body: Reply("7")
    other = lambda method, path, body: Reply('"ok"' if path == "/" else str(next(ids)))
    with serving(ring) as a, serving(other) as b:
        pool = EnvironmentPool({"sqlgym": [a, b]}, clock=JumpingClock())
        with pool.lease("sqlgym") as first:
            assert (first.root, first.id) == (a, 7)
            with pool.lease("sqlgym") as second:
                assert second.root == b
                with pool.lease("sqlgym") as third:
                    assert (third.root, third.id) == (b, 1)
        assert pool.counters()["sqlgym/refusals/duplicate_id"] == 1


def test_sessions_without_a_close_route_are_reset_and_used_again() -> None:
    created = iter(range(100))
    games = []

    def maze(method: str, path: str, body: dict) -> Reply:
        if path == "/maze/create":
            return Reply(json.dumps({"id": next(created)}))
        if path == "/maze/reset":
            games.append((body["id"], body["game"]))
            return Reply('{"observation": "walls"}')
        return Reply('{"detail": "Not Found"}', 404)

    with serving(maze) as url:
        pool = EnvironmentPool({"maze": [url]})
        for game in range(5):
            with pool.lease("maze") as session:
                session.reset(game)
        assert games == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]
        with pool.lease("maze") as first, pool.lease("maze") as second:
            assert {first.id, second.id} == {0, 1}
        pool.close()


def test_an_id_that_comes_back_while_it_is_handed_out_again_is_leased_once() -> None:
    creates = []

    def sqlgym(method: str, path: str, body: dict) -> Reply:
        if path == "/":
            return Reply('"ok"')
        creates.append(path)
        if len(creates) == 2:
            # The first lease ends, and its id is kept, before this answer arrives.
            first.__exit__(None, None, None)
        return Reply(str((0, 0, 1)[len(creates) - 1]))

    with serving(sqlgym) as url:
        pool = EnvironmentPool({"sqlgym": [url]}, clock=JumpingClock())
        first = pool.lease("sqlgym")
        assert first.__enter__().id == 0
        with pool.lease("sqlgym") as second, pool.lease("sqlgym") as third:
            assert (second.id, third.id) == (0, 1)
        assert creates == ["/create"] * 3
        assert pool.counters()["sqlgym/refusals/duplicate_id"] == 1


def test_a_session_kept_for_too_long_is_not_used_again() -> None:
    clock = JumpingClock()
    created = iter(range(100))

    def maze(method: str, path: str, body: dict) -> Reply:
        if path == "/maze/create":
            return Reply(json.dumps({"id": next(created)}))
        return Reply("true")

    with serving(maze) as url:
        pool = EnvironmentPool({"maze": [url]}, EnvPoolSettings(keep_idle=60.0), clock=clock)
        with pool.lease("maze") as session:
            assert session.id == 0
        clock.time += 61.0
        with pool.lease("maze") as session:
            assert session.id == 1


def test_a_failed_session_is_never_used_again() -> None:
    created = iter(range(100))
    resets = iter([Reply("boom", 500), Reply('{"observation": "walls"}')])

    def maze(method: str, path: str, body: dict) -> Reply:
        if path == "/maze/create":
            return Reply(json.dumps({"id": next(created)}))
        return next(resets) if path == "/maze/reset" else Reply("{}", 404)

    with serving(maze) as url:
        clock = JumpingClock()
        pool = EnvironmentPool({"maze": [url]}, clock=clock, chance=lambda: 0.0)
        assert played(pool, "maze", lambda session: (session.reset(0), session.id)) == ("walls", 1)
