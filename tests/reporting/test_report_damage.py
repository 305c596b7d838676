"""The report of a damaged run shows what can be read, without a traceback."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from report_runs import Outline, small_run

from manus_jax import report
from manus_jax.reporting.page import report_data, write_report
from manus_jax.reporting.run_data import LINE_BYTES, lines_of
from manus_jax.reporting.watch import read_view

NOT_JSON = (b"NaN", b"1e999", b"[" * 20_000, b'"', b"\n", b"9" * 5000, b"null", b"-1", b"\\ud800")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    small_run(path, range(1, 3))
    return path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Flipped bits, cut off, zeros as after a power failure, other bytes, or other values."""
    at = rng.randrange(len(content))
    kind = rng.randrange(5)
    if kind == 0:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 4, 32))):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 1:
        return content[:at]
    if kind == 2:
        return content[:at] + bytes(len(content) - at)
    if kind == 3:
        return rng.randbytes(len(content))
    digits = [i for i in range(at, len(content)) if content[i : i + 1].isdigit()]
    place = rng.choice(digits or [at])
    return content[:place] + rng.choice(NOT_JSON) + content[place + 1 :]


def test_flipped_cut_and_replaced_bytes_of_every_file_leave_a_report(run: Path) -> None:
    rng = random.Random(7)
    (run / "status.json").write_text('{"state": "running", "time": 5}')
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"]
    assert len(files) > 6
    for _ in range(12):
        for path in files:
            before = path.read_bytes()
            path.write_bytes(damaged(before, rng))
            page = Outline(write_report(run, run.parent / "page.html").read_text(encoding="ascii"))
            data = json.loads(page.scripts[0], parse_constant=pytest.fail)
            others = [p for p in files if p.parent.name == "trajectories" and p != path]
            assert len(data["episodes"]["files"]) >= len(others)
            read_view(run).text()
            path.write_bytes(before)


def edited(path: Path, change: Callable[[dict], None]) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records[0])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_rewards_that_are_no_numbers_are_empty_and_the_rest_is_there(run: Path) -> None:
    def spoil(record: dict) -> None:
        record["env_reward"] = record["turns"][0]["reward"] = float("nan")
        record["turns"][0]["log_probs"][0] = float("-inf")

    edited(run / "trajectories" / "2.jsonl", spoil)
    data = report_data(run)
    [file] = [f for f in data["episodes"]["files"] if f["step"] == 2]
    first, second = file["episodes"]
    assert first["env_reward"] is None and first["turns"][0]["log_probs"][0] is None
    assert first["turns"][1]["reward"] == 1.0 and second["reward"] == 0.0


def test_ids_outside_the_vocabulary_are_shown_as_numbers(run: Path) -> None:
    def spoil(record: dict) -> None:
        start = record["turns"][0]["start"]
        record["segments"][0][start], record["segments"][0][start + 1] = -7, 10**9

    edited(run / "trajectories" / "2.jsonl", spoil)
    [file] = [f for f in report_data(run)["episodes"]["files"] if f["step"] == 2]
    tokens = file["episodes"][0]["turns"][0]["tokens"]
    assert tokens[:2] == ["<-7>", "<1000000000>"] and len(tokens) > 2


def test_unreadable_files_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_bytes(
        b'{"step": 1, "a": NaN, "b": 2}\n\x00\xff\n{"step": 1e999}\n'
    )
    (run / "config.gin").write_bytes(b"train.total_steps = = 3\x00")
    (run / "model" / "tokenizer.json").write_text("{}")
    (run / "trajectories" / "1.jsonl").write_text("[]\n")
    report.main([str(run)])
    printed = capsys.readouterr()
    assert printed.out == f"wrote {run / 'report.html'}\n"
    warnings = printed.err.splitlines()
    assert all(line.startswith("warning: ") for line in warnings)
    for text in (
        "config.gin is damaged",
        "1 values of metrics.jsonl are not finite",
        "model/tokenizer.json is damaged",
        "1 episodes of 1.jsonl could not be parsed",
        "2 lines of metrics.jsonl could not be parsed",
    ):
        assert sum(text in line for line in warnings) == 1, text
    assert len(warnings) == 5


def test_sums_that_overflow_and_huge_steps_have_a_page(run: Path) -> None:
    lines = [{"step": 10**s, "timing_s/step": 1e308, "rollout/episodes": 1e308} for s in (1, 3, 90)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = report_data(run)
    assert data["run"]["seconds"] is None and data["run"]["step"] == 1e90


def test_a_run_that_never_wrote_a_metric_has_a_page(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "trajectories")
    data = report_data(run)
    assert (data["run"]["step"], data["run"]["total_steps"], data["series"]) == (None, 40, {})


def test_files_that_are_none_are_left_out(run: Path) -> None:
    (run / "trajectories" / "3.jsonl").mkdir()
    os.mkfifo(run / "trajectories" / "4.jsonl")
    (run / "trajectories" / "5.jsonl").symlink_to(run / "gone")
    (run / "trajectories" / f"{'9' * 100}.jsonl").write_text("")
    assert report_data(run)["episodes"]["total_files"] == 3
    for name in ("metrics.jsonl", "config.gin"):
        (run / name).unlink()
        (run / name).mkdir()
    assert report_data(run)["run"]["step"] is None


def test_files_that_cannot_be_read_are_named(run: Path) -> None:
    unreadable = Path("/proc/self/mem")  # even root gets an input/output error
    for name in ("metrics.jsonl", "config.gin", "trajectories/1.jsonl"):
        (run / name).unlink()
        (run / name).symlink_to(unreadable)
    data = report_data(run)
    assert [problem.partition(": ")[0] for problem in data["run"]["problems"]] == [
        "config.gin cannot be read",
        "metrics.jsonl cannot be read",
        "1.jsonl cannot be read",
    ]
    assert len(data["episodes"]["files"]) == 2


def test_a_line_without_end_is_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manus_jax.reporting.run_data.LINE_BYTES", 10)
    path = tmp_path / "lines"
    path.write_bytes(b"a" * 35 + b"\nshort\n" + b"b" * 10 + b"\nlast")
    assert list(lines_of(path)) == [b"a" * 10, b"short\n", b"b" * 10, b"last"]
    assert LINE_BYTES >= 1 << 20
