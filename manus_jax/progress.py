"""A progress line with numbers: a live bar on a terminal, plain lines otherwise.

Only process 0 prints.
"""

import time
from collections.abc import Mapping

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from manus_jax.status import STATUS


class ProgressLine:
    """`with ProgressLine("sft", total, start) as line: line.update(step, {"loss": 1.2})`."""

    def __init__(self, title: str, total: int, start: int = 0, every_s: float = 10.0):
        self._console = Console(quiet=jax.process_index() != 0)
        self._title, self._total, self._start = title, total, start
        self._every_s, self._last, self._began = every_s, -float("inf"), time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, completed=start, numbers="")

    def __enter__(self) -> "ProgressLine":
        STATUS.enter_stage(self._title, self._total, self._start)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, numbers: Mapping[str, float]) -> None:
        """Shows `done` of the total, and `numbers`."""
        STATUS.finish_step(done)
        text = "  ".join(f"{k} {v:,.4g}" for k, v in numbers.items())
        self._bar.update(self._task, completed=done, numbers=text)
        now = time.monotonic()
        if self._console.is_terminal or (now - self._last < self._every_s and done < self._total):
            return
        self._last = now
        per_step = (now - self._began) / max(1, done - self._start)
        left = per_step * (self._total - done)
        self._console.print(f"{self._title} {done}/{self._total}  {text}  left {left:.0f} s")

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False)
