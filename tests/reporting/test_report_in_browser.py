"""The page in a real browser: the script runs, draws and lets nothing of a run's texts run."""

import shutil
import subprocess
from pathlib import Path

import pytest
from report_runs import NASTY, new_run, played, small_run
from test_report_page import Outline, nasty_run

from manus_jax.reporting.page import write_report
from manus_jax.rollout.trajectory import FailedEpisode
from manus_jax.rollout.trajectory_files import write_trajectories

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")


def opened(run: Path, profile: Path, width: int = 1280) -> str:
    """The page as the browser has it once its script has run."""
    page = write_report(run)
    assert BROWSER is not None
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        f"--window-size={width},1000",
        "--virtual-time-budget=3000",
        "--dump-dom",
    )
    result = subprocess.run(
        [BROWSER, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    dom = result.stdout
    assert '<pre id="errors" hidden=""></pre>' in dom, "the script had an error"
    assert 'data-ready="yes"' in dom
    # What follows is what was drawn, not the data it was drawn from.
    return dom.partition("<script")[0]


def test_curves_times_and_episodes_are_drawn(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    drawn = opened(tmp_path / "run", tmp_path / "profile")
    assert drawn.count('class="curve') > 6
    assert drawn.count('class="curve raw"') > 0  # 40 steps are enough to be smoothed
    assert drawn.count('class="curve level"') == 1
    assert drawn.count('class="bar"') >= 40
    for text in ("40 / 40", "Success rate", "oracle", "update_actor 30.8%", "maze_40", "babyai_40"):
        assert text in drawn, text
    assert drawn.count('class="token"') > 3
    assert "Turn 2" in drawn and "go down" in drawn
    assert "22 of the 23 episodes" not in drawn and "of 41 files" in drawn


def test_the_page_fits_a_phone(tmp_path: Path) -> None:
    small_run(tmp_path / "run", range(1, 13))
    drawn = opened(tmp_path / "run", tmp_path / "profile", 500)
    assert drawn.count('class="curve') > 6


def test_markup_in_texts_is_text(tmp_path: Path) -> None:
    nasty_run(tmp_path / "run")
    drawn = opened(tmp_path / "run", tmp_path / "profile")
    assert "<title>run - manus_jax run</title>" in drawn
    assert not {"img", "script"} & set(Outline(drawn).tags)
    assert NASTY.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in drawn


def test_runs_with_little_in_them_have_pages_too(tmp_path: Path) -> None:
    supervised, fresh, failing = (tmp_path / name for name in ("sft", "fresh", "failing"))
    for run in (supervised, fresh):
        run.mkdir()
    (supervised / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 2.5, "timing_s/step": 1}\n{'
    )
    drawn = opened(supervised, tmp_path / "profile")
    assert "training loss" in drawn and "1 lines of metrics.jsonl could not be read" in drawn
    (fresh / "metrics.jsonl").write_text("")
    assert "No step is finished yet" in opened(fresh, tmp_path / "profile")
    directory, tokenizer = new_run(failing)
    directory.append_metrics({"step": 1, "rollout/failed": 1.0})
    failed = FailedEpisode(played(tokenizer, "maze_1#0", []).spec, "timeout", "no answer", 2)
    write_trajectories(failing / "trajectories", 1, [failed])
    assert "no answer" in opened(failing, tmp_path / "profile")
