"""The timeline of a run: spans of time on tracks, which Perfetto and the report show.

All parts of the program add to `TIMELINE`. `write` saves it as `trace.json` in Chrome's trace event
format. Each track keeps its newest spans only, so memory and file stay small however long the
run is.
"""

import contextlib
import heapq
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from manus_jax.files import write_atomically

FILE = "trace.json"
Track = Literal["learner", "engine", "environments", "weights"]
TRACKS: tuple[Track, ...] = ("learner", "engine", "environments", "weights")
SPANS_PER_TRACK = 4000


class Span(NamedTuple):
    """`start` and `end` in seconds of the monotonic clock."""

    name: str
    start: float
    end: float
    details: dict[str, float]


class Timeline:
    """Thread-safe."""

    def __init__(self, limit: int = SPANS_PER_TRACK) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self._spans: dict[Track, deque[Span]] = {t: deque(maxlen=self._limit) for t in TRACKS}
            self._open: dict[int, tuple[Track, str, float]] = {}
            self._began = time.monotonic()

    def add(self, track: Track, name: str, start: float, **details: float) -> None:
        """A span that ends now."""
        with self._lock:
            self._spans[track].append(Span(name, start, time.monotonic(), details))

    @contextlib.contextmanager
    def span(self, track: Track, name: str) -> Iterator[None]:
        """The duration of the block; `write` shows blocks that have not ended up to now."""
        key, start = object(), time.monotonic()
        with self._lock:
            self._open[id(key)] = track, name, start
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(id(key), None)
                self._spans[track].append(Span(name, start, time.monotonic(), {}))

    def spans(self) -> dict[Track, list[Span]]:
        """All spans by their start, those that have not ended until now."""
        now = time.monotonic()
        with self._lock:
            found = {track: list(spans) for track, spans in self._spans.items()}
            for track, name, start in self._open.values():
                found[track].append(Span(name, start, now, {}))
        return {track: sorted(spans, key=lambda s: s.start) for track, spans in found.items()}

    def events(self) -> dict[str, Any]:
        """Chrome's trace events. A track is a process; spans that overlap are on its threads."""
        events: list[dict[str, Any]] = []
        for pid, (track, spans) in enumerate(self.spans().items()):
            names = {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": track}}
            events += [names, names | {"name": "process_sort_index", "args": {"sort_index": pid}}]
            for span, lane in zip(spans, _lanes(spans), strict=True):
                event = {"name": span.name, "cat": track, "ph": "X", "pid": pid, "tid": lane}
                event["ts"] = round(1e6 * (span.start - self._began))
                event["dur"] = round(1e6 * (span.end - span.start))
                events.append(event | ({"args": span.details} if span.details else {}))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, directory: Path) -> None:
        write_atomically(directory / FILE, json.dumps(self.events(), separators=(",", ":")))


def _lanes(spans: list[Span]) -> list[int]:
    """The smallest free lane for each span, given in the order of their starts."""
    lanes, free, running = [], list[int](), list[tuple[float, int]]()
    for span in spans:
        while running and running[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(running)[1])
        lane = heapq.heappop(free) if free else len(running)
        heapq.heappush(running, (span.end, lane))
        lanes.append(lane)
    return lanes


TIMELINE = Timeline()
"""The timeline of this process."""
