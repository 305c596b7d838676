"""The status of this process: its progress, its rates, and work that is stuck.

All parts of the program update `STATUS`. `recorded` writes it to the run directory every few
seconds: `status.json` for people and programs, `metrics.prom` for Prometheus. The watchdog reports
work that has not ended for some minutes, with the stack of its thread.
"""

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from manus_jax.errors import exit_code
from manus_jax.files import write_atomically

_log = logging.getLogger(__name__)
FILE = "status.json"
STATES = ("running", "finished", "failed", "stopped")
_RATE_WINDOW_S = 300.0
_STACK_FRAMES = 12


@dataclasses.dataclass(eq=False)
class Work:
    """What a thread has been doing since a time of the monotonic clock."""

    name: str
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    since: float = dataclasses.field(default_factory=lambda: time.monotonic())


class Status:
    """The status of this process; thread-safe. Counters start at `begin`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, Callable[[], Mapping[str, str]]] = {}
        self._work: set[Work] = set()
        self.begin("")

    def begin(self, command: str, process: int | None = None) -> None:
        """Starts the status of a command; `process` is its number in a job of several."""
        self._command, self.began = command, time.time()
        self._process = "" if process is None else f"process {process}: "
        self._waits = False
        self._directory: Path | None = None
        self._state = "running"
        self._exit_code: int | None = None
        self._stage, self._step, self._total = "start", 0, 0
        self._stage_start = (0, time.monotonic())  # step and time
        self._phase = Work("")
        self._progressed = time.monotonic()
        self._counts: collections.Counter[str] = collections.Counter()
        self._samples: collections.deque[tuple[float, int, int]] = collections.deque()
        self.version = 0
        self.metrics: Mapping[str, Any] = {}  # of the last step
        self.validation: Mapping[str, Any] = {}  # the newest one: its step and metrics
        self.last_error: dict[str, Any] | None = None
        self.stuck: list[dict[str, Any]] = []

    def end(self, error: BaseException | None) -> None:
        self._exit_code = 0 if error is None else exit_code(error)
        stopped = self._exit_code > 128
        self._state = "finished" if error is None else "stopped" if stopped else "failed"
        self.stuck = []
        if error is not None:
            self.note_error(f"{type(error).__name__}: {error}")

    @property
    def directory(self) -> Path | None:
        return self._directory

    def use_directory(self, path: Path) -> None:
        """Sets the directory to write to, which this process owns; the first one counts."""
        self._directory = self._directory or path

    def enter_stage(self, name: str, total: int, start: int) -> None:
        """A part of the command with its own steps, such as the fine-tuning before training."""
        self._stage, self._total, self._step = name, total, start
        self._stage_start = (start, time.monotonic())

    def finish_step(self, step: int) -> None:
        self._step = step
        self._progressed = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the main thread does. A phase that raises remains visible in the final status."""
        self._phase = Work(name)
        yield
        self._phase = Work("")
        self._progressed = time.monotonic()

    @contextlib.contextmanager
    def working(self, name: str) -> Iterator[None]:
        """Something that may hang. Work that ends without an exception is progress."""
        work = Work(name)
        with self._lock:
            self._work.add(work)
        try:
            yield
            self._progressed = time.monotonic()
        finally:
            with self._lock:
                self._work.discard(work)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The main thread waits for another process, whose own watchdog reports what is stuck."""
        self._waits = True
        yield
        self._waits = False
        self._progressed = time.monotonic()

    @contextlib.contextmanager
    def serving(self, kind: str, problems: Callable[[], Mapping[str, str]]) -> Iterator[None]:
        """Servers in use: `problems()` maps their addresses to what is wrong, or to ""."""
        self._servers[kind] = problems
        try:
            yield
        finally:
            self._servers.pop(kind, None)

    def count(self, **numbers: int) -> None:
        """Adds to `episodes_in_flight`, `episodes_finished`, `episodes_failed` or `tokens`."""
        with self._lock:
            self._counts.update(numbers)

    def note_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Notes the metrics of a step, and its validation, if it had one."""
        self.metrics = dict(metrics)
        self.note_validation(metrics)

    def note_validation(self, metrics: Mapping[str, Any]) -> None:
        """Notes the validation in the metrics of a step, if there is one."""
        if found := {name: x for name, x in metrics.items() if name.startswith("val/")}:
            self.validation = {"step": metrics["step"], **found}

    def note_error(self, text: str) -> None:
        self.last_error = {"time": time.time(), "text": text[:2000]}

    def check_progress(self, limit_s: float) -> None:
        """Updates `stuck` and logs what is new in it.

        The main thread waits for others, so its phase is stuck only if nothing else progresses.
        """
        now = time.monotonic()
        with self._lock:
            late = {w: now - w.since for w in self._work}
        phase = self._phase
        if not self._waits:
            late[phase] = now - max(phase.since, self._progressed)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        groups: dict[str, list[Work]] = {}
        for work in sorted(late, key=late.__getitem__, reverse=True):
            if late[work] >= limit_s and work.thread in names:
                label = f"phase {work.name or self._stage}" if work is phase else work.name
                groups.setdefault(label, []).append(work)
        known = {entry["name"] for entry in self.stuck}
        self.stuck = [
            {
                "name": name,
                "seconds": round(late[group[0]]),
                "threads": [names[work.thread] for work in group],
                "stack": _stack(group[0].thread),
            }
            for name, group in groups.items()
        ]
        for entry in self.stuck:
            if entry["name"] not in known:
                _log.warning(
                    "%sno progress for %.1f min: %s in %d thread(s): %s\n%s",
                    self._process,
                    entry["seconds"] / 60,
                    entry["name"],
                    len(entry["threads"]),
                    ", ".join(entry["threads"][:4]),
                    entry["stack"],
                )

    def snapshot(self) -> dict[str, Any]:
        """The status as JSON."""
        now = time.monotonic()
        with self._lock:
            counts = dict(self._counts)
        finished, tokens = counts.get("episodes_finished", 0), counts.get("tokens", 0)
        self._samples.append((now, finished, tokens))
        while now - self._samples[0][0] > _RATE_WINDOW_S:
            self._samples.popleft()
        then, finished_then, tokens_then = self._samples[0]
        seconds = max(now - then, 1e-9)
        start, began = self._stage_start
        done = self._step - start
        running = self._state == "running"
        return {
            "command": self._command,
            "state": self._state,
            "exit_code": self._exit_code,
            "stage": self._stage,
            "phase": self._phase.name,
            "phase_seconds": round(now - self._phase.since, 1),
            "step": self._step,
            "total_steps": self._total,
            "weight_version": self.version,
            "eta_seconds": (now - began) / done * (self._total - self._step)
            if running and done
            else None,
            "episodes": {
                key: counts.get(f"episodes_{key}", 0) for key in ("in_flight", "finished", "failed")
            },
            "episodes_per_s": round((finished - finished_then) / seconds, 4),
            "tokens_per_s": round((tokens - tokens_then) / seconds, 2),
            "servers": {kind: _up_and_down(states()) for kind, states in [*self._servers.items()]},
            "last_error": self.last_error,
            "stuck": self.stuck,
            "metrics": {name: _finite(value) for name, value in self.metrics.items()},
            "validation": {name: _finite(value) for name, value in self.validation.items()},
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self.began,
            "time": time.time(),
        }


STATUS = Status()
"""The status of this process."""


@contextlib.contextmanager
def recorded(
    command: str, every_s: float, watchdog_minutes: float, process: int | None = None
) -> Iterator[None]:
    """Writes the status of the block to the directory that it uses, and how it ended.

    The watchdog reports work that takes longer than `watchdog_minutes`; 0 is off. In a job of
    several processes, `process` is the number of this one; those without a directory only report.
    """
    STATUS.begin(command, process)
    over = threading.Event()

    def write() -> None:
        while not over.wait(every_s):
            _write(60 * watchdog_minutes)

    handler = _LastError(logging.WARNING)
    logger = logging.getLogger("manus_jax")
    logger.addHandler(handler)
    thread = threading.Thread(target=write, name="status", daemon=True)
    thread.start()
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        over.set()
        thread.join(10.0)
        logger.removeHandler(handler)
        STATUS.end(error)
        _write()


class _LastError(logging.Handler):
    """Notes warnings and errors; prints them as Python does if no handler is configured."""

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        STATUS.note_error(record.getMessage() + (f": {cause!r}" if cause else ""))
        if logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)


def _write(watchdog_s: float = 0.0) -> None:
    """Writes the files. Errors are noted in the status and do not end the run."""
    directory = STATUS.directory
    try:
        if watchdog_s:
            STATUS.check_progress(watchdog_s)
        if directory is None:
            return
        status = STATUS.snapshot()
        write_atomically(directory / FILE, json.dumps(status, indent=1, default=str) + "\n")
        write_atomically(directory / "metrics.prom", prometheus_text(status, directory))
    except Exception as error:
        STATUS.note_error(f"{FILE} was not written: {error!r}")


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-_STACK_FRAMES:])


def _up_and_down(problems: Mapping[str, str]) -> dict[str, Any]:
    down = {url: problem for url, problem in problems.items() if problem}
    return {"up": len(problems) - len(down), "down": down}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_GAUGES = {
    "step": "Finished steps of the current stage.",
    "total_steps": "Steps of the current stage.",
    "weight_version": "Version of the weights that play episodes.",
    "eta_seconds": "Estimated seconds until the stage ends.",
    "episodes_per_s": "Finished episodes per second, over five minutes.",
    "tokens_per_s": "Generated (train) or trained (sft) tokens per second, over five minutes.",
    "exit_code": "Exit code of a command that has ended.",
}


def prometheus_text(status: Mapping[str, Any], run: Path) -> str:
    """A status in Prometheus' text format; every sample has the run's path as a label."""
    labels = {"run": str(run.resolve())}
    families: dict[str, tuple[str, list[tuple[dict[str, str], Any]]]] = {}

    def add(family: str, text: str, value: Any, **more: str) -> None:
        if isinstance(value, int | float):
            families.setdefault(f"manus_jax_{family}", (text, []))[1].append((labels | more, value))

    for state in STATES:
        add("state", "1 for the state of the run.", int(status["state"] == state), state=state)
    for name, text in _GAUGES.items():
        add(name, text, status[name])
    add("written_timestamp_seconds", "When this was written, since 1970.", status["time"])
    for name, value in status["episodes"].items():
        add("episodes", "Episodes of this process.", value, status=name)
    for kind, servers in status["servers"].items():
        add("servers", "Servers in use.", servers["up"], kind=kind, status="up")
        add("servers", "Servers in use.", len(servers["down"]), kind=kind, status="down")
    add("stuck", "Pieces of work that the watchdog reports.", len(status["stuck"]))
    for name, value in status["metrics"].items():
        add("metric", "Metrics of the last step.", value, name=name)
    for name, value in status["validation"].items():
        add("validation", "The newest validation.", value, name=name)
    lines = []
    for name, (text, samples) in families.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        for label, value in samples:
            pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in label.items())
            lines.append(f"{name}{{{pairs}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """A label value; file names that are not UTF-8 cannot be written as they are."""
    text = text.encode("utf-8", "replace").decode()
    return re.sub(r'[\\"\n]', lambda m: {"\n": "\\n"}.get(m[0], f"\\{m[0]}"), text)
