"""A report that cannot be written is reported, and training continues."""

from pathlib import Path

import pytest
from report_runs import small_run

from manus_jax.progress import ProgressLine
from manus_jax.training.trainer import write_report_or_say_why

pytestmark = pytest.mark.slow


def report_of(path: Path) -> None:
    with ProgressLine("train", 1) as line:
        write_report_or_say_why(path, line)


def test_a_run_gets_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path, range(1, 3))
    report_of(tmp_path)
    assert (tmp_path / "report.html").is_file()
    assert "report.html" not in capsys.readouterr().out


def test_a_failure_is_one_line_for_any_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_of(tmp_path / "[/bold] gone")
    said = " ".join(capsys.readouterr().out.split())
    assert "report.html was not written: ReportError: " in said
    assert "[/bold] gone does not exist" in said
    small_run(tmp_path, range(1, 3))
    (tmp_path / "report.html").mkdir()
    report_of(tmp_path)
    assert "report.html was not written: ReportError" in capsys.readouterr().out
