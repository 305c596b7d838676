"""The timeline: bounded, thread-safe, and in the format that Perfetto reads."""

import json
import threading
import time

from manus_jax.timeline import TRACKS, Timeline


def test_the_trace_has_a_process_per_track_and_a_complete_event_per_span(tmp_path):
    timeline = Timeline()
    with timeline.span("learner", "update"):
        time.sleep(0.002)
    timeline.add("environments", "maze_1#0", time.monotonic() - 0.5, turns=3)
    timeline.write(tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert tuple(names.values()) == TRACKS
    spans = {names[e["pid"]]: e for e in events if e["ph"] == "X"}
    assert spans["learner"]["name"] == "update" and spans["learner"]["dur"] >= 2000
    assert spans["environments"]["args"] == {"turns": 3}
    assert 499_000 <= spans["environments"]["dur"] <= 600_000


def test_spans_that_overlap_are_on_different_threads_of_their_track():
    timeline = Timeline()
    now = time.monotonic()
    for start in (0.3, 0.2, 0.1):  # all end now
        timeline.add("environments", f"{start}", now - start)
    lanes = {e["name"]: e["tid"] for e in timeline.events()["traceEvents"] if e["ph"] == "X"}
    assert lanes == {"0.3": 0, "0.2": 1, "0.1": 2}


def test_a_span_that_has_not_ended_is_shown_until_now():
    timeline = Timeline()
    with timeline.span("engine", "requests in flight"):
        (span,) = timeline.spans()["engine"]
        time.sleep(0.002)
        (later,) = timeline.spans()["engine"]
        assert later.start == span.start and later.end > span.end
    assert len(timeline.spans()["engine"]) == 1


def test_each_track_keeps_its_newest_spans_only():
    timeline = Timeline(limit=100)

    def add(worker):
        for number in range(200):
            timeline.add("environments", f"{worker}/{number}", time.monotonic())

    threads = [threading.Thread(target=add, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.add("weights", "version 1", time.monotonic())
    spans = timeline.spans()
    assert len(spans["environments"]) == 100 and len(spans["weights"]) == 1
    assert any(span.name.endswith("/199") for span in spans["environments"])
