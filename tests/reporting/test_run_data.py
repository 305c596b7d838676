"""The readable parts of a run directory are read."""

import json
from pathlib import Path

import pytest

from manus_jax.config.run_config import read_bindings
from manus_jax.reporting.run_data import ReportError, read_metrics, read_run


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 2}\n{"step": 2, "a": 3.5}\n{"step": 3, "a": 4')
    metrics, unreadable, _ = read_metrics(path)
    assert list(metrics) == [{"step": 1, "a": 2}, {"step": 2, "a": 3.5}]
    assert unreadable == 1


def test_only_finite_numbers_are_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": NaN, "b": -Infinity, "c": "x", "d": true, "e": 0}\n[]\n7\n')
    metrics, unreadable, not_finite = read_metrics(path)
    assert (list(metrics), unreadable, not_finite) == ([{"step": 1, "e": 0}], 2, 2)


def test_lines_of_one_step_are_joined_and_steps_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 2, "a": 1}, {"step": 0, "b": 5}, {"step": 2, "a": 3, "c": 4}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_metrics(path)[0]) == [{"step": 0, "b": 5}, {"step": 2, "a": 3, "c": 4}]


def test_a_run_needs_no_config(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert (read_run(tmp_path).config, read_run(tmp_path).metrics) == ("", ())


def test_directories_without_a_run_are_errors(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"no metrics\.jsonl; it contains the runs first"):
        read_run(tmp_path)
    with pytest.raises(ReportError, match="gone does not exist; give a run directory"):
        read_run(tmp_path / "gone")
    with pytest.raises(ReportError, match="file is a file; give a run directory"):
        read_run(tmp_path / "file")


def test_bindings_of_a_config() -> None:
    text = (
        "# Parameters for a:\n# ====\na.b = 3\na.c = \\\n    'long'\nd.e = ['x',\n       'y']\n\n"
    )
    assert read_bindings(text) == {"a.b": 3, "a.c": "long", "d.e": ["x", "y"]}
