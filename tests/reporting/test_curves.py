"""Curves, charts and times from metrics."""

import random

import pytest

from manus_jax.reporting.curves import all_series, charts, downsampled, environments, phases


def test_short_curves_are_left_alone() -> None:
    assert downsampled([1, 2, 3], [5.0, 4.0, 9.0], 3) == ([1, 2, 3], [5.0, 4.0, 9.0])


def test_long_curves_keep_their_ends_and_their_extremes() -> None:
    rng = random.Random(0)
    values = [rng.random() for _ in range(10_000)]
    values[1234], values[8765] = 50.0, -50.0
    steps, kept = downsampled(list(range(10_000)), values, 500)
    assert len(steps) <= 500
    assert steps == sorted(set(steps))
    assert kept == [values[step] for step in steps]
    assert (steps[0], steps[-1], max(kept), min(kept)) == (0, 9999, 50.0, -50.0)


def test_a_metric_has_the_steps_it_was_written_at() -> None:
    series = all_series([{"step": 0, "b": 1.0}, {"step": 5, "a": 2.0, "b": 1 / 3}])
    assert series == {"b": ([0, 5], [1.0, 0.333333]), "a": ([5], [2.0])}


def names_of(metrics: dict[str, float]) -> dict[str, list[tuple[str, str]]]:
    series = {name: ([0], [value]) for name, value in metrics.items()}
    found = charts(series)
    return {c["title"]: [(line["metric"], line["label"]) for line in c["lines"]] for c in found}


def test_training_validation_and_baselines_share_a_chart() -> None:
    found = names_of(
        {"val_oracle/success_rate": 1.0, "episode/success_rate": 0.5, "val/success_rate": 0.25}
    )
    assert found["Success rate"] == [
        ("val/success_rate", "validation"),
        ("episode/success_rate", "training"),
        ("val_oracle/success_rate", "oracle"),
    ]


def test_there_is_no_chart_without_a_curve_of_its_own() -> None:
    assert names_of({"val_oracle/success_rate": 1.0, "some/thing": 3.0}) == {}


def test_equal_curves_are_drawn_once() -> None:
    found = names_of({"critic/score/mean": 0.5, "episode/env_reward": 0.5})
    assert [metric for metric, _ in found["Score"]] == ["critic/score/mean"]


def test_one_environment_needs_no_comparison_and_two_have_one() -> None:
    one = {"val/maze/success_rate": 0.5}
    assert "Validation success by environment" not in names_of(one)
    both = names_of(one | {"val/babyai/success_rate": 0.25})
    assert both["Validation success by environment"] == [
        ("val/maze/success_rate", "maze"),
        ("val/babyai/success_rate", "babyai"),
    ]


def test_supervised_runs_have_their_loss_in_one_chart() -> None:
    found = names_of({"train/loss": 2.0, "val/loss": 1.0, "val/unigram_entropy": 5.0})
    assert [label for _, label in found["Loss"]] == ["validation", "training", "without context"]


def test_phases_add_up_to_the_step() -> None:
    metrics = [
        {"step": 0, "val/score": 1.0},
        {"step": 1, "timing_s/gen": 2.0, "timing_s/other": 0.5, "timing_s/step": 2.5},
        {"step": 2, "timing_s/gen": 1.0, "timing_s/adv": 1.0, "timing_s/step": 3.0},
    ]
    found = phases(metrics)
    assert found["names"] == ["gen", "other", "adv", "rest"]
    assert found["bars"] == [
        {"steps": [1, 1], "seconds": [2.0, 0.5, 0.0, 0.0]},
        {"steps": [2, 2], "seconds": [1.0, 0.0, 1.0, 1.0]},
    ]
    assert found["totals"] == [3.0, 0.5, 1.0, 1.0]


def test_many_steps_share_a_bar_and_still_add_up() -> None:
    rows = [
        {"step": i, "timing_s/gen": i / 7, "timing_s/adv": 1.0, "timing_s/step": i / 7 + 1}
        for i in range(1, 1001)
    ]
    found = phases(rows)
    assert len(found["bars"]) <= 120
    assert (found["bars"][0]["steps"], found["bars"][-1]["steps"][1]) == ([1, 9], 1000)
    assert found["bars"][0]["seconds"] == pytest.approx([5 / 7, 1.0])
    assert found["names"] == ["gen", "adv"]


def test_a_run_without_phases_has_its_steps() -> None:
    found = phases([{"step": 1, "timing_s/step": 4.0}])
    assert (found["names"], found["bars"]) == (["step"], [{"steps": [1, 1], "seconds": [4.0]}])


def test_environments_by_first_latest_and_best() -> None:
    metrics = [
        {
            "step": 0,
            "val/success_rate": 0.2,
            "val/maze/success_rate": 0.1,
            "val/tc/success_rate": 0.3,
        }
        | {"val_random/maze/success_rate": 0.05},
        {
            "step": 5,
            "val/success_rate": 0.6,
            "val/maze/success_rate": 0.7,
            "val/tc/success_rate": 0.5,
        },
        {
            "step": 9,
            "val/success_rate": 0.4,
            "val/maze/success_rate": 0.4,
            "val/tc/success_rate": 0.4,
        }
        | {"val/maze/score": 0.3, "val/maze/turns": 6.0},
    ]
    maze, tc, every = environments(metrics)
    assert maze == {
        "env": "maze",
        "first": [0, 0.1],
        "last": [9, 0.4],
        "best": 0.7,
        "score": 0.3,
        "turns": 6.0,
        "baselines": {"random": 0.05},
    }
    assert (tc["env"], tc["score"], tc["baselines"]) == ("tc", None, {})
    assert (every["env"], every["best"]) == ("all", 0.6)
    assert environments([{"step": 1, "val/loss": 3.0}]) == []
