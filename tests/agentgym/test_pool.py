"""Leases: exclusive, spread over healthy servers, given back, waited for in bounds."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from retried import played
from scripted_servers import Hang, HangUp, Reply, TextcraftStub, recorded, serving

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.leases import Clock
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.server_settings import EnvPoolSettings


class JumpingClock(Clock):
    """Time passes only when somebody waits, and then at once."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        self.time += seconds


def pool_of(urls: list[str], clock: Clock | None = None, **settings: object) -> EnvironmentPool:
    given = {"connect_timeout": 2.0, "read_timeout": 0.3, **settings}
    steady = EnvPoolSettings(**given)  # type: ignore[arg-type]
    return EnvironmentPool(
        {"textcraft": urls}, steady, clock=clock or JumpingClock(), chance=lambda: 0.0
    )


def winning(session: Session) -> float:
    session.reset(5)
    session.step("look")
    session.step("win")
    return session.episode_reward


@pytest.fixture
def stub() -> TextcraftStub:
    return TextcraftStub()


@pytest.fixture
def url(stub: TextcraftStub) -> Iterator[str]:
    with serving(stub) as address:
        yield address


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


def test_items_that_a_server_cannot_start_do_not_put_it_aside(
    stub: TextcraftStub, url: str
) -> None:
    clock = JumpingClock()
    pool = pool_of([url], clock)
    stub.faults["reset"] = Reply("Internal Server Error", 500)
    for _ in range(20):
        with pytest.raises(EnvironmentFailure) as caught:
            played(pool, "textcraft", winning)
        assert caught.value.refused_item == 5
    stub.faults.clear()
    assert played(pool, "textcraft", winning) == 1.0
    assert clock.time == 0.0  # nobody waited


def test_a_server_that_starts_no_item_does_not_attract_the_episodes_of_the_others() -> None:
    broken, alive = TextcraftStub(), TextcraftStub()
    broken.faults["reset"] = Reply("Internal Server Error", 500)
    with serving(broken) as a, serving(alive) as b:
        pool = pool_of([a, b])
        assert [played(pool, "textcraft", winning) for _ in range(20)] == [1.0] * 20
        assert pool.counters()["textcraft/failures/status"] == 1


def test_a_dead_server_is_put_aside_and_the_other_one_plays() -> None:
    dead, alive = TextcraftStub(), TextcraftStub()
    with serving(alive) as good:
        with serving(dead) as bad:
            pass
        pool = pool_of([bad, good])
        assert [played(pool, "textcraft", winning) for _ in range(10)] == [1.0] * 10
        # Asked once; while it is aside, nobody pays for it.
        assert pool.counters()["textcraft/failures/connection"] == 1


def test_a_server_that_dies_in_mid_episode_costs_a_retry_and_no_reward() -> None:
    dying, alive = TextcraftStub(), TextcraftStub()
    with serving(dying) as a, serving(alive) as b:
        pool = pool_of([a, b])

        def episode(session: Session) -> tuple[str, float]:
            session.reset(0)
            dying.faults["step"] = HangUp
            session.step("win")
            return session.root, session.episode_reward

        assert played(pool, "textcraft", episode) == (b, 1.0)
        assert pool.counters()["textcraft/failures/connection"] == 1


def test_a_server_that_comes_back_is_tried_with_one_session_and_then_used(
    stub: TextcraftStub, url: str
) -> None:
    clock = JumpingClock()
    pool = pool_of([url], clock, first_retry=10.0)
    stub.faults["create"] = HangUp
    stub.faults[""] = HangUp

    def heal(condition: threading.Condition, seconds: float) -> None:
        clock.time += seconds
        if clock.time > 25.0:
            stub.faults.clear()

    clock.wait = heal  # type: ignore[method-assign]
    assert played(pool, "textcraft", winning) == 1.0
    # Aside for 10 s, then for 20 s after the failed check; at 30 s it is back.
    assert clock.time == 30.0
    assert pool.counters()["textcraft/failures/connection"] == 2


def test_waiting_for_a_server_is_bounded_and_says_what_is_wrong() -> None:
    with serving(TextcraftStub()) as dead:
        pass
    clock = JumpingClock()
    pool = pool_of([dead], clock, patience=100.0)
    with pytest.raises(EnvironmentFailure) as caught, pool.lease("textcraft"):
        pass
    assert caught.value.kind is FailureKind.NO_SERVER
    assert not caught.value.retryable
    assert "no free session within 100 s" in str(caught.value)
    assert f"{dead} failed" in str(caught.value)
    assert "refused" in str(caught.value)
    assert clock.time >= 100.0


def test_episodes_do_not_wait_for_a_dead_server_one_after_another() -> None:
    with serving(TextcraftStub()) as dead:
        pass
    clock = JumpingClock()
    pool = pool_of([dead], clock, patience=100.0)
    for _ in range(20):
        with pytest.raises(EnvironmentFailure, match="no free session"), pool.lease("textcraft"):
            pass
    assert clock.time < 200.0


def test_a_server_that_comes_back_ends_the_time_without_servers(
    stub: TextcraftStub, url: str
) -> None:
    clock = JumpingClock()
    pool = pool_of([url], clock, patience=100.0)
    stub.faults["create"] = HangUp
    with pytest.raises(EnvironmentFailure, match="no free session"), pool.lease("textcraft"):
        pass
    stub.faults.clear()
    clock.time += 100.0
    assert played(pool, "textcraft", winning) == 1.0
    stub.faults["create"] = HangUp
    began = clock.time
    with pytest.raises(EnvironmentFailure, match="no free session"), pool.lease("textcraft"):
        pass
    assert clock.time - began >= 100.0


def test_a_server_that_never_creates_a_session_is_not_waited_for(
    stub: TextcraftStub, url: str
) -> None:
    clock = JumpingClock()
    pool = pool_of([url], clock, patience=600.0)
    stub.faults["create"] = Reply("Internal Server Error", 500)
    for _ in range(20):
        with pytest.raises(EnvironmentFailure, match=r"no server creates a session; .*HTTP 500"):
            played(pool, "textcraft", winning)
    # 0.5 + 1 + 2 + 4 + 8 + 16 + 32 s of trials, and no more.
    assert clock.time == 63.5
    stub.faults.clear()
    clock.time += 60.0
    assert played(pool, "textcraft", winning) == 1.0


def test_waiting_for_room_is_bounded_too(url: str) -> None:
    pool = pool_of([url], sessions_per_server=1, patience=5.0)
    with (
        pool.lease("textcraft"),
        pytest.raises(EnvironmentFailure, match="has 1 of 1 sessions in use"),
        pool.lease("textcraft"),
    ):
        pass
    with pool.lease("textcraft"):
        pass


def test_a_wedged_environment_does_not_block_another() -> None:
    wedged = TextcraftStub()
    wedged.faults["create"] = Hang
    with serving(wedged) as a, serving(recorded("weather")) as b:
        pool = EnvironmentPool(
            {"textcraft": [a], "weather": [b]}, EnvPoolSettings(connect_timeout=2, read_timeout=30)
        )

        def stuck() -> None:
            with contextlib.suppress(EnvironmentFailure), pool.lease("textcraft"):
                pass

        threads = [threading.Thread(target=stuck, daemon=True) for _ in range(16)]
        for thread in threads:
            thread.start()
        while len(wedged.calls) < 16:
            time.sleep(0.001)
        with pool.lease("weather") as session:
            assert session.reset(0).startswith("Now new trial starts.")
        assert all(thread.is_alive() for thread in threads)
        pool.close()
    for thread in threads:
        thread.join()


def test_a_server_that_hangs_is_put_aside_after_its_timeout() -> None:
    wedged, alive = TextcraftStub(), TextcraftStub()
    wedged.faults["create"] = Hang
    with serving(wedged) as a, serving(alive) as b:
        pool = pool_of([a, b])
        assert [played(pool, "textcraft", winning) for _ in range(5)] == [1.0] * 5
        assert pool.counters()["textcraft/failures/timeout"] == 1


def test_a_server_that_stays_down_is_reported_broken_once(url: str, stub: TextcraftStub) -> None:
    stub.faults["create"] = HangUp
    reported = []
    pool = EnvironmentPool(
        {"textcraft": [url]},
        EnvPoolSettings(patience=10.0, first_retry=1.0, broken_after=3),
        clock=JumpingClock(),
        chance=lambda: 0.0,
        on_broken=lambda env, where: reported.append((env, where)),
    )
    with pytest.raises(EnvironmentFailure), pool.lease("textcraft"):
        pass
    # Incidents at 0, 1 and 3 s; at 7 s the fourth; then the deadline.
    assert reported == [("textcraft", url)] * 2


def test_a_replaced_server_takes_over(stub: TextcraftStub, url: str) -> None:
    with serving(TextcraftStub()) as dead:
        pass
    pool = pool_of([dead])
    pool.put_server("textcraft", url, instead_of=dead)
    assert played(pool, "textcraft", winning) == 1.0


def test_leases_after_the_last_server_is_dropped_say_why(url: str) -> None:
    pool = pool_of([url])
    with pool.lease("textcraft") as session:
        session.reset(0)
        pool.drop_server("textcraft", url, "died 5 times")
    message = r"there is no server; .*died 5 times"
    with pytest.raises(EnvironmentFailure, match=message), pool.lease("textcraft"):
        pass


def test_a_session_that_cannot_be_closed_is_counted_and_nothing_more(
    stub: TextcraftStub, url: str
) -> None:
    pool = pool_of([url])
    stub.faults["close"] = Reply("no", 500)
    assert played(pool, "textcraft", winning) == 1.0
    assert pool.counters()["textcraft/failures/close"] == 1


def test_a_closed_pool_and_an_environment_that_is_not_open_are_refused(url: str) -> None:
    pool = pool_of([url])
    with pytest.raises(ValueError, match="'maze' is not open; open are: textcraft"):
        played(pool, "maze", winning)
    with pytest.raises(ValueError, match="unknown environment 'mazes'"):
        played(pool, "mazes", winning)
    pool.close()
    with pytest.raises(EnvironmentFailure, match="the pool is closed"):
        played(pool, "textcraft", winning)


@pytest.mark.slow
@pytest.mark.bug("B31")
def test_thousands_of_leases_leave_nothing_behind(stub: TextcraftStub, url: str) -> None:
    pool = EnvironmentPool({"textcraft": [url]}, EnvPoolSettings(sessions_per_server=32))

    def episode(number: int) -> None:
        with pool.lease("textcraft"):
            pass

    with ThreadPoolExecutor(64) as threads:
        list(threads.map(episode, range(1000)))
    assert stub.live == set()
    assert pool.counters() == {"textcraft/leases": 1000}
    state = pool._groups["textcraft"]._servers[url].state
    assert (state.leases, state.health.incidents) == (0, 0)
