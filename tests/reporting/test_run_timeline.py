"""The timeline in the report: the end of trace.json, of limited size, for any content."""

import json
import time

import pytest

from manus_jax.reporting.run_timeline import BINS, MAX_SPANS, in_flight, read_timeline
from manus_jax.timeline import Timeline


def test_the_page_gets_the_newest_spans_and_the_number_of_episodes(tmp_path):
    timeline, now = Timeline(), time.monotonic()
    for ago in (4.0, 3.0):
        timeline.add("learner", "gen", now - ago)
        timeline.add("environments", f"maze_{ago}", now - ago)
    timeline.add("weights", "version 1", now - 1.0)
    timeline.write(tmp_path)
    problems = []
    data = read_timeline(tmp_path, problems)
    assert problems == []
    assert data["seconds"] == pytest.approx(4.0, abs=0.1)
    assert [span[0] for span in data["tracks"]["learner"]] == ["gen", "gen"]
    assert data["tracks"]["weights"][0][1] == pytest.approx(3.0, abs=0.1)
    assert data["episodes"][0] == 1 and data["episodes"][BINS // 2] == 2


def test_a_long_run_gives_a_short_list(tmp_path):
    timeline = Timeline()
    for _ in range(3 * MAX_SPANS):
        timeline.add("learner", "gen", time.monotonic())
    timeline.write(tmp_path)
    assert len(read_timeline(tmp_path, [])["tracks"]["learner"]) == MAX_SPANS


def test_episodes_are_counted_by_their_share_of_an_interval():
    counts = in_flight([(0.0, 10.0), (2.5, 5.0), (-5.0, 0.05), (9.975, 30.0)], 10.0)
    assert len(counts) == BINS  # of 0.05 s
    assert (counts[0], counts[1], counts[49], counts[50], counts[100]) == (2, 1, 1, 2, 1)
    assert counts[-1] == 1.5


@pytest.mark.parametrize(
    "text", ["", "{}", '{"traceEvents": [3]}', "[" * 10**5, "\x00", '{"traceEvents": {"a": 1}}']
)
def test_a_damaged_file_is_a_problem_that_the_page_shows(tmp_path, text):
    (tmp_path / "trace.json").write_text(text)
    problems = []
    assert read_timeline(tmp_path, problems) is None
    assert len(problems) == 1 and problems[0].startswith("trace.json cannot be read")


def test_a_run_without_a_trace_has_no_timeline(tmp_path):
    assert read_timeline(tmp_path, problems := []) is None
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": []}))
    assert read_timeline(tmp_path, problems) is None and problems == []
