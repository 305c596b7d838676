"""Where a run reports its progress: metrics.jsonl, TensorBoard, wandb and the terminal."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.markup import escape

from manus_jax.config.settings import TrainSettings
from manus_jax.progress import ProgressLine
from manus_jax.reporting.diagnoses import Diagnostician
from manus_jax.training.metric_sinks import Sink, open_sinks
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.timer import RunCosts
from manus_jax.training.validation import validation_line

_SHOWN = ("critic/score/mean", "episode/success_rate", "actor/pg_loss")


class RunLog:
    """`last` has the newest value of every metric, `costs` the time and memory of the run."""

    def __init__(self, directory: RunDirectory, sink: Sink, line: ProgressLine) -> None:
        self.line, self.last = line, dict[str, float]()
        self._directory, self._sink = directory, sink
        past = [_numbers(line) for line in directory.metrics()]
        self._diagnostician, self.costs = Diagnostician(past), RunCosts(past)

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, which are complete."""
        self._directory.append_metrics({"step": number, **metrics})
        self._sink(number, metrics)
        self.last.update(metrics)

    def amend(self, number: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to those of an earlier step."""
        self._directory.amend_metrics(number, metrics)
        self._sink(number, metrics)
        self.last.update(metrics)

    def diagnose(self, number: int, metrics: Mapping[str, float]) -> None:
        """Prints what the metrics of a step reveal about the run."""
        for finding in self._diagnostician.after_step({"step": number, **metrics}):
            self.warn(number, finding.text)

    def warn(self, number: int, text: str) -> None:
        self.line.say(escape(f"step {number}: {text}"))

    def validation(self, number: int, metrics: Mapping[str, float]) -> None:
        """Prints the result of the validation of a step."""
        self.line.say(validation_line(number, metrics))

    def show(self, number: int) -> None:
        """Updates the progress line after a step."""
        self.line.update(number, {x.split("/")[1]: self.last.get(x, 0.0) for x in _SHOWN})


@contextlib.contextmanager
def open_run_log(train: TrainSettings, directory: RunDirectory, start: int) -> Iterator[RunLog]:
    """The log of a run that continues after step `start`; everything is written at the end."""
    with (
        directory.flushing_metrics(),
        ProgressLine("train", train.total_steps, start) as line,
        open_sinks(train, directory, start) as sink,
    ):
        if start:
            line.say(f"resumed at step {start}")
        yield RunLog(directory, sink, line)


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """A line of metrics without other values, which a damaged file may contain."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}
