"""The status of a run: its files, its end, what is stuck, and the view of it."""

import contextlib
import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from manus_jax import report, status
from manus_jax.errors import Stopped, Terminated, UserError
from manus_jax.progress import ProgressLine
from manus_jax.reporting import watch
from manus_jax.status import STATUS, prometheus_text, recorded
from manus_jax.training.run_directory import RunDirectory, RunDirectoryError


def read(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_a_run_is_written_while_it_runs_and_when_it_ends(tmp_path: Path) -> None:
    problems = {"http://a": "", "http://b": "timeout", "http://c": ""}
    with recorded("train", 0.02, 0):
        STATUS.use_directory(tmp_path)
        STATUS.use_directory(tmp_path / "warm_start")  # the first directory counts
        with (
            ProgressLine("train", 10, start=2) as line,
            STATUS.phase("gen"),
            STATUS.serving("environments", lambda: problems),
        ):
            line.update(4, {})
            STATUS.version = 4
            STATUS.note_metrics({"step": 3, "val/loss": 0.5, "val/bad": float("inf")})
            STATUS.note_metrics({"step": 4, "actor/loss": float("nan")})
            STATUS.count(episodes_in_flight=3, episodes_finished=7, tokens=50)
            STATUS.count(episodes_in_flight=-1, episodes_failed=1)
            running = eventually(
                lambda: (
                    (tmp_path / "status.json").exists()
                    and (found := read(tmp_path))["episodes"]["failed"]
                    and found
                )
            )
    assert running["state"] == "running" and running["exit_code"] is None
    assert (running["stage"], running["phase"]) == ("train", "gen")
    assert (running["step"], running["total_steps"], running["weight_version"]) == (4, 10, 4)
    assert running["episodes"] == {"in_flight": 2, "finished": 7, "failed": 1}
    assert running["servers"] == {"environments": {"up": 2, "down": {"http://b": "timeout"}}}
    assert (running["pid"], running["host"]) == (os.getpid(), socket.gethostname())
    assert running["metrics"] == {"step": 4, "actor/loss": None}
    assert running["validation"] == {"step": 3, "val/loss": 0.5, "val/bad": None}
    ended = read(tmp_path)
    assert (ended["state"], ended["exit_code"], ended["servers"]) == ("finished", 0, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.prom", "status.json"]


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (UserError("no such thing"), "failed", 2),
        (ValueError("a bug"), "failed", 1),
        (Stopped("error: process 0: gone", 1), "failed", 1),
        (Stopped("saved", 143), "stopped", 143),
        (KeyboardInterrupt(), "stopped", 130),
    ],
)
def test_how_a_run_ended_is_written(
    tmp_path: Path, error: BaseException, state: str, code: int
) -> None:
    with pytest.raises(type(error)), recorded("train", 5, 0):
        STATUS.use_directory(tmp_path)
        with STATUS.phase("update_actor"):
            raise error
    ended = read(tmp_path)
    assert (ended["state"], ended["exit_code"], ended["phase"]) == (state, code, "update_actor")
    assert ended["last_error"]["text"] == f"{type(error).__name__}: {error}"


def test_rates_and_the_time_left_follow_from_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = status.Status()
    found.enter_stage("train", total=20, start=10)
    assert found.snapshot()["eta_seconds"] is None
    now[0] += 60
    found.count(tokens=6000, episodes_finished=30)
    found.finish_step(12)
    at_12 = found.snapshot()
    assert at_12["eta_seconds"] == 8 * 30
    assert (at_12["tokens_per_s"], at_12["episodes_per_s"]) == (100.0, 0.5)
    now[0] += 299  # the first sample leaves the window of 300 s
    found.count(tokens=2990)
    assert found.snapshot()["tokens_per_s"] == 10.0


def test_warnings_of_the_program_are_noted_and_still_printed(tmp_path: Path) -> None:
    code = (
        "import logging; from manus_jax.status import recorded, STATUS\n"
        "from pathlib import Path\n"
        "with recorded('train', 5, 0):\n"
        f"    STATUS.use_directory(Path({str(tmp_path)!r}))\n"
        "    logging.getLogger('manus_jax.vllm.pool').warning('%s is out of service', 'http://a')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "http://a is out of service\n")
    assert read(tmp_path)["last_error"]["text"] == "http://a is out of service"


def test_files_that_cannot_be_written_do_not_end_the_run(tmp_path: Path) -> None:
    with recorded("train", 0.01, 0):
        STATUS.use_directory(tmp_path / "gone")
        eventually(lambda: STATUS.last_error)
    assert STATUS.last_error is not None and "was not written" in STATUS.last_error["text"]


def test_the_watchdog_reports_stuck_work_with_its_stack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]  # the watchdog's clock, so that both threads become late together
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(status, "time", clock)
    release, both_work = threading.Event(), threading.Barrier(3)

    def wait_for_the_server() -> None:
        with STATUS.working("maze server http://a: step"):
            both_work.wait()
            release.wait()

    threads = [threading.Thread(target=wait_for_the_server, name=f"episode_{i}") for i in range(2)]
    with caplog.at_level(logging.WARNING), recorded("train", 0.02, 0.1 / 60):
        STATUS.use_directory(tmp_path)
        with STATUS.phase("gen"):
            for thread in threads:
                thread.start()
            both_work.wait()
            now[0] += 0.2

            def stuck() -> list[dict[str, Any]]:
                found = read(tmp_path)["stuck"] if (tmp_path / "status.json").exists() else []
                return [entry for entry in found if entry["name"].startswith("maze server")]

            [entry] = eventually(stuck)
            stuck_gauge = re.compile(r'^manus_jax_stuck\{run=".*"\} [12]\.0$', re.MULTILINE)
            gauges = tmp_path / "metrics.prom"  # written after status.json
            eventually(lambda: gauges.exists() and stuck_gauge.search(gauges.read_text()))
            release.set()
            for thread in threads:
                thread.join()
            eventually(lambda: not stuck())
    assert entry["name"] == "maze server http://a: step"
    assert set(entry["threads"]) == {"episode_0", "episode_1"}
    assert "in wait_for_the_server\n    release.wait()" in entry["stack"]
    reports = [r.getMessage() for r in caplog.records if "maze server" in r.getMessage()]
    assert len(reports) == 1
    assert reports[0].startswith("no progress for 0.0 min: maze server http://a: step in 2 thread")
    assert "release.wait()" in reports[0]


def test_a_phase_is_stuck_only_if_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = status.Status()
    with found.phase("gen"):
        for _ in range(3):
            with found.working("an episode's turn"):
                now[0] += 50
            found.check_progress(60)
            assert found.stuck == []
        with pytest.raises(OSError), found.working("a turn that fails"):
            now[0] += 59
            raise OSError
        found.check_progress(60)
        assert found.stuck == []
        now[0] += 1
        found.check_progress(60)
        assert [(entry["name"], entry["seconds"]) for entry in found.stuck] == [("phase gen", 60)]


def test_the_watchdog_names_the_main_thread_if_nothing_moves(tmp_path: Path) -> None:
    with recorded("train", 0.02, 0.1 / 60):
        STATUS.use_directory(tmp_path)
        with ProgressLine("sft", 10), STATUS.phase("update_actor"):
            [entry] = eventually(lambda: STATUS.stuck)
    assert (entry["name"], entry["threads"]) == ("phase update_actor", ["MainThread"])
    assert "test_the_watchdog_names_the_main_thread" in entry["stack"]


def test_every_process_of_a_job_reports_a_stall_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Only process 0 has a directory.
    with (
        caplog.at_level(logging.WARNING),
        recorded("train", 0.02, 0.1 / 60, process=3),
        STATUS.phase("update_actor"),
    ):
        eventually(lambda: STATUS.stuck)
    assert caplog.text.count("process 3: no progress for") == 1
    assert "phase update_actor" in caplog.text and "test_every_process_of_a_job" in caplog.text


def test_a_process_that_waits_for_another_one_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = status.Status()
    with found.waiting():
        now[0] += 100
        found.check_progress(60)
        assert found.stuck == []
    now[0] += 59
    found.check_progress(60)
    assert found.stuck == []
    now[0] += 1
    found.check_progress(60)
    assert len(found.stuck) == 1


def test_a_watchdog_of_0_minutes_is_off(tmp_path: Path) -> None:
    with recorded("train", 0.01, 0):
        STATUS.use_directory(tmp_path)
        time.sleep(0.1)
    assert STATUS.stuck == [] and read(tmp_path)["stuck"] == []


SAMPLE = re.compile(
    r'[a-zA-Z_:][a-zA-Z0-9_:]*\{([a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*",?)*\} (\S+)'
)


def test_metrics_are_in_the_format_of_prometheus(tmp_path: Path) -> None:
    name = 'a "run" \\ of\nsome \udcff kind'
    STATUS.begin("train")
    STATUS.metrics = {"val/pass@2": 1, 'x"\\\n': 2.5, "text": "no number", "bad": float("inf")}
    STATUS.note_validation({"step": 7, "val/success_rate": 0.25})
    text = prometheus_text(STATUS.snapshot(), tmp_path / name)
    assert text.endswith("\n")
    seen: set[str] = set()
    family = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            family = line.split()[2]
            assert family not in seen, "a family is one block"
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {family} gauge"
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert line.startswith(family + "{run=")
            float(match[2])
            assert line.rpartition(" ")[0] not in seen
            seen.add(line.rpartition(" ")[0])
        seen.add(family)
    assert 'name="val/pass@2"} 1.0' in text and 'name="x\\"\\\\\\n"} 2.5' in text
    assert re.search(r'manus_jax_validation{run=".*",name="val/success_rate"} 0.25', text)
    assert 'state="running"} 1.0' in text and "bad" not in text and "no number" not in text


def written(run: Path, **changes: Any) -> Path:
    STATUS.begin("train")
    STATUS.enter_stage("train", total=10, start=0)
    STATUS.note_error("late \x1b[31m\nanswer")
    STATUS.note_metrics({"step": 0, "val/success_rate": 0.25, "val/score": 0.5})
    run.mkdir(exist_ok=True)
    (run / "status.json").write_text(json.dumps(STATUS.snapshot() | changes))
    return run


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("changes", "state", "text"),
    [
        ({}, "running", "running: train for 0 s (process"),
        ({"pid": "DEAD"}, "dead", "is gone, last seen 0 s ago"),
        ({"time": 5.0}, "silent", "no sign of process"),
        ({"host": "another", "pid": 1, "time": 5.0}, "silent", "no sign of process 1 on another"),
        ({"state": "finished", "exit_code": 0}, "finished", "finished with exit code 0"),
        ({"state": "failed", "exit_code": 2}, "failed", "failed with exit code 2"),
        ({"state": "stopped", "exit_code": 143}, "stopped", "stopped with exit code 143"),
        ({"state": "lost"}, "damaged", "status.json is damaged"),
        ({"pid": "x"}, "damaged", "status.json is damaged"),
        ({"episodes": None}, "damaged", "status.json is damaged"),
    ],
)
def test_the_view_shows_state_progress_and_errors(
    tmp_path: Path, changes: dict[str, Any], state: str, text: str
) -> None:
    changes = {k: dead_pid() if v == "DEAD" else v for k, v in changes.items()}
    view = watch.read_view(written(tmp_path / "run", **changes))
    assert view.state == state and text in view.text()
    assert view.ended == (state in ("dead", "finished", "failed", "stopped"))
    if state != "damaged":
        assert "step      0 of 10" in view.text()
        assert "validated step 0: val/success_rate 0.25" in view.text()
        assert "error     late  [31m answer" in view.text()


def test_a_view_of_a_run_that_has_not_begun_or_wrote_no_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main([str(tmp_path / "soon"), "--watch"])
    assert "state     not started: there is no" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"st')
    report.main([str(tmp_path), "--watch"])
    assert "step      3, the last in metrics.jsonl" in capsys.readouterr().out


def test_a_terminal_shows_the_run_until_it_ends(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    threading.Timer(0.3, written, [run], {"state": "failed", "exit_code": 1}).start()
    console = Console(force_terminal=True, file=io.StringIO(), width=120)
    watch.watch(run, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "running: train" in shown and "failed with exit code 1" in shown
    assert "\x1b[31m\n" not in shown  # of the error's text


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Terminated])
def test_the_live_view_ends_quietly_at_ctrl_c_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[KeyboardInterrupt]
) -> None:
    def interrupted(seconds: float) -> None:
        raise stop

    monkeypatch.setattr(watch, "time", types.SimpleNamespace(sleep=interrupted, time=time.time))
    console = Console(force_terminal=True, file=io.StringIO(), width=120)
    terminated = stop is Terminated
    with pytest.raises(Terminated) if terminated else contextlib.nullcontext():
        watch.watch(written(tmp_path / "run"), console)


def test_a_command_that_is_refused_leaves_the_status_of_the_run_alone(tmp_path: Path) -> None:
    with recorded("train", 5, 0):
        RunDirectory(tmp_path, "train.seed = 1\n")
    before = (tmp_path / "status.json").read_text()
    with pytest.raises(RunDirectoryError, match="other settings"), recorded("train", 5, 0):
        RunDirectory(tmp_path, "train.seed = 2\n")
    assert (tmp_path / "status.json").read_text() == before
    assert read(tmp_path)["state"] == "finished"
