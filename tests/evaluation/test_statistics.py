"""Estimates with intervals, by hand."""

import itertools
import math

import pytest

from manus_jax.evaluation.statistics import average, ks_up_to, pass_at_k, share, wilson


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # three of the six pairs hold the one success
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # one of ten triples holds none of the two
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 2, 3) == 1.0  # three of four cannot all be the two losses
    assert pass_at_k(1, 1, 1) == 1.0


@pytest.mark.parametrize(("samples", "successes", "k"), [(6, 2, 3), (7, 3, 2), (8, 1, 8)])
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_success(
    samples: int, successes: int, k: int
) -> None:
    verdicts = [True] * successes + [False] * (samples - successes)
    draws = [any(draw) for draw in itertools.combinations(verdicts, k)]
    assert pass_at_k(samples, successes, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize("wrong", [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_of_impossible_counts_is_an_error(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*wrong)


def test_ks_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [ks_up_to(n) for n in (1, 2, 3, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6]]


def test_wilson_intervals_from_the_literature() -> None:
    assert wilson(0.8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    # Nothing of ten: from 0 to z² / (n + z²) = 3.8414588 / 13.8414588.
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)
    assert wilson(1.0, 10) == pytest.approx((0.7224672, 1.0), abs=1e-6)


def test_a_share_counts_tasks_and_not_samples() -> None:
    estimate = share([1.0, 0.5, 1.0, 0.5, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    assert estimate is not None
    assert (estimate.value, estimate.tasks) == (0.8, 10)
    assert (estimate.low, estimate.high) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert share([]) is None


def test_an_average_has_the_normal_interval_of_its_mean() -> None:
    estimate = average([0.0, 1.0, 1.0, 2.0])
    assert estimate is not None
    # Variance (1 + 0 + 0 + 1) / 3, so the mean's standard error is sqrt(2 / 3 / 4).
    half = 1.959964 * math.sqrt(1 / 6)
    assert estimate.value == 1.0
    assert (estimate.low, estimate.high) == pytest.approx((1 - half, 1 + half))


def test_one_task_has_a_score_and_no_interval() -> None:
    estimate = average([0.25])
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high, estimate.tasks) == (0.25, None, None, 1)
    assert average([]) is None
