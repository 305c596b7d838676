"""Which server gets a request, as a table of states."""

from hypothesis import given
from hypothesis import strategies as st

from manus_jax.servers.health import BackOff
from manus_jax.vllm.routing import (
    VllmServerState,
    answered,
    came_up,
    choose,
    due,
    sent,
    went_down,
)

BACK_OFF = BackOff(first=1.0, limit=5.0)


def server(url, in_flight=0, capacity=4, ready=True):
    return VllmServerState(url, ready, capacity, in_flight)


def test_a_new_session_goes_to_the_least_loaded():
    assert choose([server("a", 2), server("b", 1)], None, 2).url == "b"


def test_a_session_stays_until_its_server_is_much_more_loaded():
    assert choose([server("a", 2), server("b", 0)], "a", 2).url == "a"
    assert choose([server("a", 3), server("b", 0)], "a", 2).url == "b"


def test_a_session_moves_when_its_server_is_out_of_service_or_full():
    assert choose([server("a", ready=False), server("b", 3)], "a", 2).url == "b"
    assert choose([server("a", 4), server("b", 3)], "a", 2).url == "b"
    assert choose([server("b", 3)], "gone", 2).url == "b"


def test_there_is_nobody_when_all_are_full_or_out_of_service():
    assert choose([server("a", 4), server("b", ready=False)], "a", 2) is None
    assert choose([], None, 2) is None


def test_waits_double_up_to_a_limit_and_are_forgotten_in_service():
    state = came_up(VllmServerState("a"), 4)
    waits = []
    for _ in range(5):
        state = went_down(state, "dead", 100.0, BACK_OFF)
        waits.append(state.health.retry_at - 100.0)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert not due(state, 104.9)
    assert due(state, 105.0)
    state = went_down(came_up(state, 4), "dead", 200.0, BACK_OFF)
    assert state.health.retry_at == 201.0


@given(st.lists(st.booleans(), max_size=30))
def test_what_is_in_flight_is_what_was_sent_less_what_was_answered(events):
    state, flying = came_up(VllmServerState("a"), 100), 0
    for out in events:
        if out or flying == 0:
            state, flying = sent(state), flying + 1
        else:
            state, flying = answered(state), flying - 1
        assert state.in_flight == flying
    assert went_down(state, "dead", 0.0, BACK_OFF).in_flight == 0
