"""Which server gets a request, as a table of states."""

import pytest

from manus_jax.servers.health import BackOff
from manus_jax.vllm.client import VllmServer
from manus_jax.vllm.members import Member, choose

BACK_OFF = BackOff(first=1.0, limit=5.0)


def server(url, in_flight=0, capacity=4, ready=True):
    return Member(VllmServer(url), ready, capacity, in_flight)


def chosen(*arguments):
    return choose(*arguments).server.url


def test_a_new_session_goes_to_the_least_loaded():
    assert chosen([server("a", 2), server("b", 1)], None, 2) == "b"


def test_a_session_stays_until_its_server_is_much_more_loaded():
    assert chosen([server("a", 2), server("b", 0)], "a", 2) == "a"
    assert chosen([server("a", 3), server("b", 0)], "a", 2) == "b"


def test_a_session_moves_when_its_server_is_out_of_service_or_full():
    assert chosen([server("a", ready=False), server("b", 3)], "a", 2) == "b"
    assert chosen([server("a", 4), server("b", 3)], "a", 2) == "b"
    assert chosen([server("b", 3)], "gone", 2) == "b"


def test_no_server_is_chosen_when_all_are_full_or_out_of_service():
    assert choose([server("a", 4), server("b", ready=False)], "a", 2) is None
    assert choose([], None, 2) is None


def test_waits_double_up_to_a_limit_and_are_forgotten_in_service():
    member = server("a")
    waits = []
    for _ in range(5):
        member.go_down("dead", 100.0, BACK_OFF)
        waits.append(member.health.retry_at - 100.0)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert not member.due(104.9)
    assert member.due(105.0)
    member.come_up(4)
    assert member.ready and not member.due(106.0)
    member.go_down("dead", 200.0, BACK_OFF)
    assert member.health.retry_at == 201.0


def test_a_server_that_goes_down_has_nothing_in_flight_and_its_busy_time_ends(monkeypatch):
    member, clock = server("a"), iter([10.0, 11.0, 13.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    member.set_in_flight(1)
    member.set_in_flight(2)
    member.go_down("dead", 13.0, BACK_OFF)
    assert member.in_flight == 0
    member.set_in_flight(1)
    assert member.counters.busy_seconds == pytest.approx(3.0)
