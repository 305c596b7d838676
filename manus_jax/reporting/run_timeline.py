"""The end of a run's timeline, from its `trace.json`: what each part did over time.

A page shows at most a few hundred spans of each track; episodes, of which there are many at a time,
are shown as their number in each interval.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from manus_jax.timeline import FILE, TRACKS

MAX_SPANS = 400  # per track
BINS = 200

Spans = dict[str, list[tuple[str, float, float]]]
"""Name, start and end in seconds of each span, by track."""


def read_timeline(run: Path, problems: list[str]) -> dict[str, Any] | None:
    """The data of the timeline; None if the run has none. Appends what is wrong with the file."""
    path = run / FILE
    if not path.is_file():
        return None
    try:
        spans = _spans(json.loads(path.read_text(errors="replace"))["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problems.append(f"{FILE} cannot be read: {type(error).__name__}")
        return None
    learner = spans["learner"]
    if not learner:
        return None
    end = max(stop for track in spans.values() for _, _, stop in track)
    start = min(start for _, start, _ in learner[-MAX_SPANS:])
    seconds = max(1e-6, end - start)
    shown = {
        track: [[name, round(max(0.0, a - start), 3), round(b - start, 3)] for name, a, b in found]
        for track in TRACKS
        if track != "environments"
        for found in [[span for span in spans[track] if span[2] >= start][-MAX_SPANS:]]
    }
    episodes = in_flight(((a - start, b - start) for _, a, b in spans["environments"]), seconds)
    return {"seconds": round(seconds, 3), "tracks": shown, "episodes": episodes}


def _spans(events: list[dict[str, Any]]) -> Spans:
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found: Spans = {track: [] for track in TRACKS}
    for event in events:
        if event["ph"] == "X" and names.get(event["pid"]) in found:
            start, length = 1e-6 * float(event["ts"]), 1e-6 * float(event["dur"])
            if math.isfinite(start) and math.isfinite(length) and length >= 0:
                found[names[event["pid"]]].append((str(event["name"]), start, start + length))
    return {track: sorted(spans, key=lambda span: span[1]) for track, spans in found.items()}


def in_flight(spans: Iterable[tuple[float, float]], seconds: float) -> list[float]:
    """The mean number of spans in each of BINS equal intervals of `seconds`."""
    width = seconds / BINS
    totals = [0.0] * BINS
    for start, end in spans:
        start, end = max(0.0, start), min(seconds, end)
        if end <= start:
            continue
        for index in range(int(start / width), min(BINS, int(end / width) + 1)):
            totals[index] += max(0.0, min(end, (index + 1) * width) - max(start, index * width))
    return [round(total / width, 2) for total in totals]
