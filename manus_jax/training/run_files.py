"""Files of a run that the training loop does not wait for: written in order, by one thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from manus_jax.data_proto import DataProto
from manus_jax.progress import ProgressLine
from manus_jax.reporting.page import write_report
from manus_jax.rollout.trajectory import Outcome
from manus_jax.rollout.trajectory_files import write_trajectories
from manus_jax.status import STATUS
from manus_jax.timeline import TIMELINE


class BackgroundFiles:
    """A context manager, which waits at its end. Errors are raised by the next `write` or `wait`.

    Outside its block, files are written at once.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._writing: list[Future[Any]] = []

    def __enter__(self) -> "BackgroundFiles":
        self._thread = ThreadPoolExecutor(1, "files")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._thread is not None
        self._thread.shutdown()
        self._thread = None
        if kind is None:  # otherwise the error of the block is the one to report
            self.wait()

    def write(self, write: Callable[..., Any], *arguments: Any) -> None:
        """Calls `write(*arguments)` in the thread, after everything before it."""
        if self._thread is None:
            write(*arguments)
            return
        for done in [job for job in self._writing if job.done()]:
            self._writing.remove(done)
            done.result()
        self._writing.append(self._thread.submit(write, *arguments))

    def wait(self) -> None:
        """Waits until everything is on disk."""
        writing, self._writing = self._writing, []
        for job in writing:
            job.result()


def write_report_or_say_why(run: Path, line: ProgressLine) -> None:
    """Writes trace.json and report.html. Errors are reported and do not end the run."""
    try:
        TIMELINE.write(run)
    except OSError as error:
        STATUS.note_error(f"trace.json was not written: {error!r}")
    try:
        write_report(run)
    except Exception as error:
        line.say(escape(f"report.html was not written: {type(error).__name__}: {error}"))


def write_episodes(run: Path, step: int, played: Sequence[Outcome], batch: DataProto) -> None:
    """Writes the episodes of a step with the advantages of their tokens, as far as known."""
    write_trajectories(run / "trajectories", step, played, _advantages_by_uid(batch))


def _advantages_by_uid(batch: DataProto) -> dict[str, list[np.ndarray]]:
    """The advantages of each segment's tokens, [T], by episode."""
    found: dict[str, list[np.ndarray]] = {}
    if "advantages" in batch.batch:
        lengths = np.asarray(batch.batch["attention_mask"]).sum(1)
        rows = zip(batch.non_tensor_batch["uid"], batch.batch["advantages"], lengths, strict=True)
        for uid, advantages, length in rows:
            found.setdefault(uid, []).append(np.asarray(advantages)[:length])
    return found
