"""The page and the command that writes it."""

import json
import re
import sys
from pathlib import Path

import pytest
from report_runs import NASTY, Outline, nasty_run, new_run, played, small_run

from manus_jax import command, report
from manus_jax.reporting.page import report_data, script_safe_json, write_report
from manus_jax.rollout.trajectory_files import write_trajectories


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    small_run(tmp_path, range(1, 4))
    text = write_report(tmp_path).read_text(encoding="ascii")
    outline = Outline(text)
    assert outline.links == []
    assert (outline.tags.count("script"), outline.tags.count("style")) == (2, 1)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "default-src 'none'" in text


def test_the_page_holds_the_data_as_it_is(tmp_path: Path) -> None:
    small_run(tmp_path, range(1, 4))
    data = json.loads(Outline(write_report(tmp_path).read_text()).scripts[0])
    assert data == json.loads(json.dumps(report_data(tmp_path)))
    axis, values = data["series"]["critic/score/mean"]
    assert (data["axes"][axis], values) == ([1, 2, 3], [0.0125, 0.025, 0.0375])
    assert (data["run"]["step"], data["run"]["total_steps"]) == (3, 40)
    assert (data["run"]["episodes"], data["run"]["seconds"]) == (6, 9.75)


def test_texts_of_a_run_never_become_markup(tmp_path: Path) -> None:
    plain, nasty = tmp_path / "plain", tmp_path / "<b>nasty & {{SCRIPT}}"
    small_run(plain, range(1, 2))
    nasty_run(nasty)
    ours = Outline(write_report(nasty).read_text())
    assert ours.tags == Outline(write_report(plain).read_text()).tags
    data = json.loads(ours.scripts[0])
    [episode] = data["episodes"]["files"][0]["episodes"]
    assert episode["turns"][0]["observation"] == NASTY
    assert "".join(episode["turns"][0]["tokens"]).startswith(NASTY)
    assert data["run"]["name"] == "<b>nasty & {{SCRIPT}}"


def test_json_in_a_script_has_no_character_of_markup() -> None:
    text = script_safe_json({"a": "</script><!--&\u2028\ud800"})
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script><!--&\u2028\ud800"}


@pytest.mark.slow
def test_a_long_run_gives_a_small_page(tmp_path: Path) -> None:
    directory, tokenizer = new_run(tmp_path)
    names = [f"some/metric_{i}" for i in range(40)]
    lines = (
        {"step": s, **{n: (s * 7919 % 1000) / 997 + i for i, n in enumerate(names)}}
        for s in range(7_000)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    episode = played(tokenizer, "maze_1#0", [("go up " * 100, "x" * 50_000, 1.0)] * 8)
    path = write_trajectories(tmp_path / "trajectories", 1, [episode] * 64)
    for step in range(2, 30):
        (tmp_path / "trajectories" / f"{step}.jsonl").hardlink_to(path)
    assert write_report(directory.path).stat().st_size < 13_000_000


def test_a_supervised_run_and_one_without_a_step_have_pages(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 2.5, "timing_s/step": 1}\n{"st'
    )
    data = report_data(tmp_path)
    assert [chart["title"] for chart in data["charts"]] == ["Loss"]
    assert data["run"]["problems"] == ["1 lines of metrics.jsonl could not be parsed"]
    assert data["episodes"]["files"] == []
    (tmp_path / "metrics.jsonl").write_text("")
    assert write_report(tmp_path).is_file()
    assert report_data(tmp_path)["run"]["step"] is None


def test_the_command_writes_to_the_path_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(tmp_path / "run", range(1, 3))
    report.main([str(tmp_path / "run")])
    report.main([str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {tmp_path / 'run' / 'report.html'}",
        f"wrote {tmp_path / 'page.html'}",
    ]
    assert (tmp_path / "page.html").read_text() == (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none does not exist"),
        (
            ["."],
            "is not a run directory: it has no metrics.jsonl; it contains the runs run",
        ),
        (["run", "--out", "no/where/page.html"], "no/where/page.html cannot be written"),
        (["run", "--out", "run"], "run is a directory, not a file"),
        (["run/metrics.jsonl"], "run/metrics.jsonl is a file"),
        (["run/metrics.jsonl", "--watch"], "run/metrics.jsonl is a file"),
        (["a" * 5000], "more than 4096"),
        (["~nobody_here/run", "--watch"], "home directory of an unknown user"),
        (["run", "--out", "~nobody_here/page.html"], "home directory of an unknown user"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    small_run(tmp_path / "run", range(1, 2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command.run(report.main)
    assert stopped.value.code == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("error: ") and message in text and "\n" not in text
