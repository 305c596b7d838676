"""Validations of a run: held-out tasks, played with the weights of a step on process 0.

In an asynchronous run a validation runs while the learner continues, so its metrics arrive some
steps later; they belong to the step at which it started.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from manus_jax.data_proto import DataProto
from manus_jax.evaluation.play import EvaluationResult
from manus_jax.rollout.trajectory_files import write_trajectories
from manus_jax.training.job import Job
from manus_jax.training.rollouts import Rollouts
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.run_summary import validation_file

Validated = tuple[int, dict[str, float]]
"""The step and its metrics."""


@dataclasses.dataclass
class Validation:
    """At most one validation at a time. `rollouts` is None on processes other than 0.

    All processes call the same methods, except that only process 0 calls `ended`.
    """

    rollouts: Rollouts | None
    directory: RunDirectory
    job: Job

    def __post_init__(self) -> None:
        self._running: tuple[int, Sequence[str], Future[list[EvaluationResult]]] | None = None

    def start(self, step: int, baselines: Sequence[str] = ()) -> None:
        """Starts the validation of a step, with the weights that the engine has received last."""
        self.job.on_primary(lambda: self._start(step, baselines))

    def finish(self) -> Validated | None:
        """Waits for the validation that was started; None if there is none."""
        wait = lambda: DataProto.empty({"validated": self.ended(wait=True)})
        return self.job.from_primary(wait).meta_info["validated"]

    def run(self, step: int, baselines: Sequence[str] = ()) -> dict[str, float]:
        """Validates with the policy and the named baselines; returns the metrics."""
        self.start(step, baselines)
        validated = self.finish()
        assert validated is not None
        return validated[1]

    def repeat(self, step: int) -> None:
        """Starts the validation of the step that is resumed, if it was lost with the process."""
        self.job.on_primary(lambda: self._repeat(step))

    def ended(self, wait: bool) -> Validated | None:
        """The result of the validation that was started; None if it is running or there is none."""
        if self._running is None or not (wait or self._running[2].done()):
            return None
        (step, baselines, future), self._running = self._running, None
        *played, result = future.result()
        metrics: dict[str, float] = {}
        for name, baseline in zip(baselines, played, strict=True):
            baseline.check_played(f"validation with {name}")
            metrics |= baseline.metrics(f"val_{name}")
        directory = self.directory.path / "trajectories"
        write_trajectories(directory, validation_file(step), result.outcomes)
        result.check_played(f"validation at step {step}")
        return step, metrics | result.metrics()

    def _start(self, step: int, baselines: Sequence[str] = ()) -> None:
        assert self.rollouts is not None and self._running is None
        self._running = step, baselines, self.rollouts.validate(*baselines, "val")

    def _repeat(self, step: int) -> None:
        assert self.rollouts is not None
        train = self.rollouts.train
        due = step % train.test_freq == 0 and step < train.total_steps
        line = next((x for x in self.directory.metrics() if x["step"] == step), {})
        if due and "val/failed" not in line:
            self._start(step)


def score(metrics: Mapping[str, float]) -> float | None:
    """The mean of the environments' scores; None without a validation."""
    scores = [v for k, v in metrics.items() if k.startswith("val/") and k.endswith("/score")]
    return sum(scores) / len(scores) if scores else None


def validation_line(step: int, metrics: Mapping[str, float]) -> str:
    shown = [
        f"{name.removeprefix('val/')} {value:.3f}"
        for name, value in metrics.items()
        if name.startswith("val/") and name.endswith(("/success_rate", "/score"))
    ]
    if failed := metrics["val/failed"]:
        shown.append(f"{failed:.0f} episodes were dropped")
    return f"validation at step {step}: " + ", ".join(shown)
