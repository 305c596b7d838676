"""The pool with servers that fail, hang, return or are replaced."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pools import JumpingClock, pool_of, winning
from retried import played
from scripted_servers import Hang, HangUp, Reply, TextcraftStub, recorded, serving

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.server_settings import EnvPoolSettings


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
    settings = EnvPoolSettings(sessions_per_server=32, patience=5.0)
    pool = EnvironmentPool({"textcraft": [url]}, settings)

    def episode(number: int) -> None:
        with pool.lease("textcraft"):
            pass

    with ThreadPoolExecutor(64) as threads:
        list(threads.map(episode, range(1000)))
    assert stub.live == set()
    assert pool.counters() == {"textcraft/leases": 1000}
    with contextlib.ExitStack() as leases:  # all 32 places are free
        for _ in range(32):
            leases.enter_context(pool.lease("textcraft"))
    assert pool.counters() == {"textcraft/leases": 1032}
