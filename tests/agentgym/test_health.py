"""The state machine of server health, with given times."""

from dataclasses import replace

import pytest

from manus_jax.agentgym.failures import FailureKind
from manus_jax.agentgym.server_state import (
    EnvServerState,
    available,
    broken,
    choose,
    failed,
    granted,
    keeping,
    next_trial,
    refused_session,
    released,
    succeeded,
)
from manus_jax.servers.health import BackOff, HealthPolicy

POLICY = HealthPolicy(BackOff(first=1.0, factor=2.0, limit=8.0, jitter=0.5))
A, B, C = EnvServerState("a"), EnvServerState("b"), EnvServerState("c")


def lost(state: EnvServerState, now: float, chance: float = 0.0) -> EnvServerState:
    return failed(state, FailureKind.CONNECTION, now, chance, POLICY)


def bad(state: EnvServerState, now: float) -> EnvServerState:
    return failed(state, FailureKind.STATUS, now, 0.0, POLICY)


@pytest.mark.parametrize(
    ("failures", "chance", "seconds"),
    [(1, 0.0, 1.0), (2, 0.0, 2.0), (4, 0.0, 8.0), (9, 0.0, 8.0), (3, 0.5, 3.0), (1, 1.0, 0.5)],
)
def test_back_off_doubles_up_to_a_limit_and_jitter_shortens_it(
    failures: int, chance: float, seconds: float
) -> None:
    assert POLICY.back_off.seconds(failures, chance) == seconds


def test_back_off_after_thousands_of_failures_is_the_limit() -> None:
    assert POLICY.back_off.seconds(100_000, 0.0) == 8.0


def test_the_least_loaded_healthy_server_is_chosen() -> None:
    busy, idle = replace(A, leases=3), replace(B, leases=1)
    assert choose([busy, idle], now=0.0) is idle
    assert choose([A, B], now=0.0) is A
    assert choose([], now=0.0) is None


def test_a_lost_server_is_put_aside_and_tried_again_later() -> None:
    aside = lost(A, now=10.0)
    assert aside.health.retry_at == 11.0
    assert not available(aside, now=10.9)
    assert choose([aside, replace(B, leases=50)], now=10.9).url == "b"  # type: ignore[union-attr]
    assert next_trial([aside], now=10.25) == 0.75
    assert available(aside, now=11.0)


def test_only_one_trial_goes_to_a_suspect_server() -> None:
    trial = granted(lost(A, now=0.0))
    assert trial.trial_out
    assert not available(trial, now=5.0)
    assert next_trial([trial], now=5.0) is None
    assert available(released(trial, trial=True), now=5.0)


def test_leases_of_the_past_coming_back_do_not_end_the_trial() -> None:
    trial = granted(lost(granted(A), now=0.0))
    assert released(trial, trial=False).trial_out


def test_a_good_step_makes_a_suspect_server_healthy() -> None:
    healthy = succeeded(granted(lost(A, now=0.0)))
    assert not healthy.suspect
    assert healthy.leases == 1
    assert available(healthy, now=0.0)
    assert lost(healthy, now=20.0).health.retry_at == 21.0


def test_one_incident_seen_by_many_sessions_counts_once() -> None:
    state = lost(A, now=0.0)
    for _ in range(63):
        state = lost(state, now=0.5)
    assert (state.health.incidents, state.health.retry_at) == (1, 1.0)


def test_failed_trials_wait_longer_and_longer_until_the_server_is_broken() -> None:
    state, waits = A, []
    now = 0.0
    while not broken(state, POLICY):
        state = lost(granted(state), now)
        waits.append(state.health.retry_at - now)
        now = state.health.retry_at
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_single_bad_answers_are_forgiven_and_a_row_of_them_is_not() -> None:
    twice = bad(bad(A, 0.0), 0.0)
    assert not twice.suspect
    assert not bad(bad(succeeded(twice), 0.0), 0.0).suspect
    assert bad(twice, 0.0).suspect


def test_a_bad_answer_to_a_trial_is_enough() -> None:
    assert bad(granted(lost(A, now=0.0)), now=1.0).health.incidents == 2


def test_an_unknown_item_does_not_mark_the_server_down() -> None:
    assert failed(A, FailureKind.ITEM, 0.0, 0.0, POLICY) is A


def test_a_server_that_refuses_a_session_is_left_alone_until_another_comes_back() -> None:
    full = refused_session(granted(granted(A)), trial=False)
    assert full.leases == 1
    assert not available(full, now=0.0)
    assert next_trial([full], now=0.0) is None
    assert available(released(full, trial=False), now=0.0)


def test_a_full_server_still_gives_its_idle_sessions() -> None:
    assert available(keeping(refused_session(granted(granted(A)), trial=False), idle=1), now=0.0)


def test_a_server_that_refuses_its_only_session_is_not_full() -> None:
    assert not refused_session(granted(A), trial=False).full
    # Two sessions asked for at once, both refused: the second finds nobody else out.
    first = refused_session(granted(granted(A)), trial=False)
    assert first.full
    assert not refused_session(first, trial=False).full


def test_a_server_that_answers_badly_is_put_aside_but_not_broken() -> None:
    state = A
    for now in range(100, 1000, 100):
        state = bad(state, now)
    assert state.health.incidents > 4
    assert not broken(state, POLICY)
    assert not broken(bad(lost(lost(lost(state, 1e4), 2e4), 3e4), 4e4), POLICY)


def test_a_server_holds_no_more_than_its_limit() -> None:
    state = EnvServerState("a", limit=2)
    assert available(granted(state), now=0.0)
    assert not available(granted(granted(state)), now=0.0)


def test_leases_of_a_server_that_was_replaced_at_its_address_never_count_below_zero() -> None:
    assert released(A, trial=False).leases == 0


def test_states_are_values() -> None:
    assert granted(A) == granted(EnvServerState("a"))
    assert EnvServerState("c") == C
