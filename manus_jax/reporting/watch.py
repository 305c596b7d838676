"""The live view of a run, from its `status.json`: what it does, how fast, and what is wrong."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from manus_jax.errors import Terminated
from manus_jax.files import read_text
from manus_jax.reporting.run_data import ReportError, read_metrics
from manus_jax.status import FILE, STATES

SILENT_S = 60.0
"""A running process that has written no status for this long does not respond."""

_REFRESH_S = 1.0
_METRICS = (
    "episode/success_rate",
    "critic/score/mean",
    "actor/pg_loss",
    "train/loss",
)
_VALIDATION = ("val/success_rate", "val/loss")


@dataclasses.dataclass(frozen=True)
class View:
    """What there is to show: labelled lines, and whether the run has ended."""

    state: str
    lines: tuple[tuple[str, str], ...]
    ended: bool

    def text(self) -> str:
        return "\n".join(f"{label:9s} {line}" for label, line in self._rows())

    def table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        colours = {"running": "green", "finished": "green", "not started": "yellow"}
        for label, line in self._rows():
            style = colours.get(self.state, "red") if label == "state" else ""
            style = "red" if label in ("stuck", "error") else style
            table.add_row(Text(label, style="dim"), Text(line, style=style))
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        for label, line in self.lines:
            # Messages of servers and models can contain terminal control characters.
            yield label, re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", line)


def watch(run: Path, console: Console | None = None) -> None:
    """Shows a run until it ends or Ctrl-C; without a terminal, prints its status once."""
    run = run.expanduser()
    if run.exists() and not run.is_dir():
        raise ReportError(f"{run} is a file; give a run directory (train.run_dir)")
    console = console or Console()
    view = read_view(run)
    if not console.is_terminal:
        print(view.text())
        return
    try:
        with Live(view.table(), console=console) as live:
            while not view.ended:
                time.sleep(_REFRESH_S)
                view = read_view(run)
                live.update(view.table())
    except KeyboardInterrupt as stop:
        if isinstance(stop, Terminated):
            raise


def read_view(run: Path) -> View:
    """The view of a run directory, which may be missing, incomplete or damaged."""
    path = run / FILE
    try:
        status = json.loads(read_text(path))
        state, detail, ended = _state(status, time.time())
        return View(state, (("run", str(run)), ("state", detail), *_lines(status)), ended)
    except FileNotFoundError:
        state, detail = "not started", f"not started: there is no {path}"
    except OSError as error:
        state, detail = "unreadable", f"unknown: {path} cannot be read: {error}"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        state, detail = "damaged", f"unknown: {path} is damaged"
    lines = [("run", str(run)), ("state", detail)]
    with contextlib.suppress(OSError):
        if metrics := read_metrics(run / "metrics.jsonl")[0]:
            lines.append(("step", f"{metrics[-1]['step']:.0f}, the last in metrics.jsonl"))
    return View(state, tuple(lines), ended=False)


def _state(status: dict[str, Any], now: float) -> tuple[str, str, bool]:
    """The state, its description, and whether the run has ended."""
    state = status["state"]
    if state not in STATES:
        raise ValueError(state)
    if state != "running":
        return state, f"{state} with exit code {status['exit_code']:d}", True
    age = now - status["time"]
    process = f"process {status['pid']:d} on {status['host']}"
    if status["host"] == socket.gethostname() and not _alive(status["pid"]):
        return "dead", f"dead: {process} is gone, last seen {_duration(age)} ago", True
    if age > SILENT_S:
        return "silent", f"no sign of {process} for {_duration(age)}", False
    phase = f", {status['phase']}" if status["phase"] else ""
    doing = f"{status['stage']}{phase} for {_duration(status['phase_seconds'])}"
    return state, f"running: {doing} ({process})", False


def _lines(status: dict[str, Any]) -> Iterator[tuple[str, str]]:
    eta, episodes = status["eta_seconds"], status["episodes"]
    left = "" if eta is None else f", {_duration(eta)} left"
    yield "step", f"{status['step']:d} of {status['total_steps']:d}{left}"
    yield "weights", f"version {status['weight_version']:d}"
    yield (
        "episodes",
        ", ".join(f"{episodes[name]:d} {name.replace('_', ' ')}" for name in episodes)
        + f", {status['episodes_per_s']:.3g} per s",
    )
    yield "tokens", f"{status['tokens_per_s']:,.0f} per s"
    for kind, servers in status["servers"].items():
        down = "".join(f"; {url}: {problem}" for url, problem in servers["down"].items())
        yield "servers", f"{kind}: {servers['up']:d} up, {len(servers['down'])} down{down}"
    if numbers := _numbers(status["metrics"], _METRICS):
        yield "metrics", numbers
    if numbers := _numbers(status["validation"], _VALIDATION):
        yield "validated", f"step {status['validation']['step']:.0f}: {numbers}"
    for stuck in status["stuck"]:
        threads = ", ".join(stuck["threads"][:4])
        yield "stuck", f"{stuck['name']}: no progress for {_duration(stuck['seconds'])} ({threads})"
        for line in stuck["stack"].splitlines()[-4:]:
            yield "", line
    if error := status["last_error"]:
        ago = _duration(status["time"] - error["time"])
        yield "error", f"{error['text']} ({ago} before the last update)"


def _numbers(metrics: dict[str, Any], names: tuple[str, ...]) -> str:
    found = {name: metrics.get(name) for name in names}
    return ", ".join(f"{n} {x:.4g}" for n, x in found.items() if isinstance(x, int | float))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # PermissionError: of another user
    return True


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
