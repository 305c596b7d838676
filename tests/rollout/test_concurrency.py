"""Adaptive concurrency: within its limits, lower under pressure, higher without, never stuck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manus_jax.rollout.concurrency import LOWERING, Concurrency, Window


def window(failed=0, in_flight=10**5, queued=0.0, kv_usage=0.1, environment_seconds=0.05):
    return Window(32, failed, in_flight, queued, kv_usage, environment_seconds)


def after(state, *windows):
    for seen in windows:
        state = state.decide(seen)
    return state


def test_it_doubles_until_the_first_pressure_and_then_grows_slowly():
    state = after(Concurrency.between(8, 1000), *[window()] * 4)
    assert (state.limit, state.decision) == (128, "raise")
    state = state.decide(window(queued=64))
    assert (state.limit, state.decision) == (108, "engine")  # 0.85 of 128, rounded down
    assert state.decide(window()).limit == 125  # 1.15 of 108, rounded up


@pytest.mark.parametrize(
    ("seen", "decision", "limit"),
    [
        (window(queued=26), "engine", 85),
        (window(queued=20), "hold", 100),
        (window(kv_usage=0.96), "engine", 85),
        (window(kv_usage=0.9), "hold", 100),
        (window(failed=10), "failures", 50),
        (window(failed=9), "raise", 200),
        (window(environment_seconds=0.2), "environments", 85),
        (window(environment_seconds=0.1), "raise", 200),
        (window(environment_seconds=0.0), "raise", 200),  # no call in this window
        (window(in_flight=79), "hold", 100),  # there are no more episodes to play
    ],
)
def test_each_kind_of_pressure_is_named(seen, decision, limit):
    state = Concurrency(1, 1000, 100, fastest=0.05)
    after_it = state.decide(seen)
    assert (after_it.decision, after_it.limit) == (decision, limit)


def test_an_environment_that_stays_slow_becomes_the_new_normal():
    state = after(Concurrency.between(8, 64), *[window()] * 4)
    assert state.limit == 64
    state = after(state, *[window(environment_seconds=0.5)] * 20)
    assert state.decision == "environments"
    state = after(state, *[window(environment_seconds=0.5)] * 150)
    assert (state.decision, state.limit) == ("raise", 64)


WINDOWS = st.builds(
    Window,
    episodes=st.integers(1, 5000),
    failed=st.integers(0, 5000),
    in_flight=st.floats(0, 1e5),
    queued=st.floats(0, 1e5),
    kv_usage=st.floats(0, 1),
    environment_seconds=st.floats(0, 1e4),
)


@given(st.integers(1, 5000), st.integers(0, 5000), st.lists(WINDOWS, max_size=40))
def test_the_limits_hold_and_no_history_prevents_recovery(least, more, windows):
    state = Concurrency.between(least, least + more)
    for seen in windows:
        before, state = state.limit, state.decide(seen)
        assert least <= state.limit <= least + more
        assert state.window >= 8  # there is always a next decision
        lowered = state.decision in LOWERING
        assert (state.limit <= before) if lowered else (state.limit >= before)
    state = after(state, *[window(environment_seconds=0.0)] * 70)  # 1.15**70 > 10_000
    assert state.limit == least + more


@given(st.integers(1, 64), st.integers(0, 4000), st.lists(WINDOWS, max_size=20))
def test_lasting_pressure_ends_at_the_lower_limit(least, more, windows):
    state = after(Concurrency.between(least, least + more), *windows)
    state = after(state, *[window(kv_usage=1.0)] * 70)  # 0.85**70 < 1 / 10_000
    assert state.limit == least
