"""The page in a real browser: its script runs, and no text of a run is executed."""

import shutil
import subprocess
from pathlib import Path

import pytest
from report_runs import NASTY, Outline, nasty_run, new_run, played, small_run

from manus_jax.reporting.compare import write_comparison
from manus_jax.reporting.page import write_report
from manus_jax.rollout.trajectory import FailedEpisode
from manus_jax.rollout.trajectory_files import write_trajectories

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")


def dom_of(page: Path, profile: Path, width: int = 1280) -> str:
    """A page as the browser has it once its script has run without an error."""
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
    assert '<pre id="errors" hidden=""></pre>' in result.stdout, "the script had an error"
    assert 'data-ready="yes"' in result.stdout
    return result.stdout


def opened(run: Path, profile: Path, width: int = 1280) -> str:
    """What is drawn of a run, without the data it is drawn from."""
    return dom_of(write_report(run), profile, width).partition("<script")[0]


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
    assert "of 41 files" in drawn


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
    assert "training loss" in drawn and "1 lines of metrics.jsonl could not be parsed" in drawn
    (fresh / "metrics.jsonl").write_text("")
    assert "No step has finished yet" in opened(fresh, tmp_path / "profile")
    directory, tokenizer = new_run(failing)
    directory.append_metrics({"step": 1, "rollout/failed": 1.0})
    failed = FailedEpisode(played(tokenizer, "maze_1#0", []).spec, "timeout", "no answer", 2)
    write_trajectories(failing / "trajectories", 1, [failed])
    assert "no answer" in opened(failing, tmp_path / "profile")


def test_hovering_reads_out_and_choosing_shows(tmp_path: Path) -> None:
    """A second script plays the reader: it points, chooses and notes what the page shows.

    The first merge of the tokenizer, "go", comes after 3 special tokens and 256 bytes.
    """
    small_run(tmp_path / "run")
    page = write_report(tmp_path / "run")
    text = page.read_text()
    allowed = text.replace("script-src 'sha256-", "script-src 'unsafe-inline' 'not-")
    probe = """
    setTimeout(() => {
      const notes = [];
      const point = (node, share) => {
        const box = node.getBoundingClientRect();
        node.dispatchEvent(new PointerEvent("pointermove", {
          clientX: box.left + share * box.width, clientY: box.top + 20, bubbles: true }));
        notes.push(document.getElementById("tip").innerText.replace(/\\s+/g, " "));
      };
      point(document.querySelector('svg[aria-label="Success rate"]'), 0.99);
      point(document.querySelectorAll("svg .bar")[1], 0.5);
      const shade = () => getComputedStyle(document.querySelector(".token")).backgroundColor;
      const pressed = (label) => [...document.querySelectorAll(".switch button")]
        .find((button) => button.textContent === label).click();
      const byLogProb = shade();
      pressed("advantage");
      notes.push(byLogProb !== shade() ? "recoloured" : "as before");
      document.querySelector(".token").dispatchEvent(new PointerEvent("pointerenter"));
      notes.push(document.getElementById("tip").innerText.replace(/\\s+/g, " "));
      const outcome = document.querySelectorAll(".controls select")[1];
      outcome.value = "lost";
      outcome.dispatchEvent(new Event("change"));
      notes.push(document.querySelector("article h3").textContent);
      outcome.value = "failed";
      outcome.dispatchEvent(new Event("change"));
      notes.push(document.querySelector("article").textContent);
      const note = document.createElement("pre");
      note.id = "notes";
      note.textContent = notes.join("|");
      document.getElementById("errors").after(note);
    }, 500);
    """
    page.write_text(allowed.replace("</body>", f"<script>{probe}</script></body>"))
    drawn = dom_of(page, tmp_path / "profile").partition('<pre id="notes">')[2]
    assert drawn.partition("</pre>")[0].split("|") == [
        "step 40 validation 77.5% training 100.0% oracle 100.0%",
        "step 2 · 3.25 s gen 2 s · 61.5% update_actor 1 s · 30.8% other 0.25 s · 7.7%",
        "recoloured",
        '"go" token 259 log-prob −0.5 (p 0.607) advantage 0.75',
        "babyai_40",
        "Choose an episode.",
    ]


def test_a_comparison_is_drawn_with_bands_and_a_table(tmp_path: Path) -> None:
    for name in ("a", "b"):
        small_run(tmp_path / name, range(1, 13))
    page = tmp_path / "comparison.html"
    write_comparison([tmp_path / "a", tmp_path / "b"], page, None)
    drawn = dom_of(page, tmp_path / "profile").partition("<script")[0]
    assert drawn.count('class="band"') > 2
    assert "Success rate: training" in drawn and "peak memory" in drawn
