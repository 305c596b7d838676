"""Metrics for programs that people watch runs with: TensorBoard's event files, wandb.

They are copies. `metrics.jsonl` is the truth, and a run that resumes tells each of them from which
step on it will say things again, so that none shows a step twice.
"""

import contextlib
import importlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

from manus_jax.config.binding import ConfigError
from manus_jax.config.run_config import read_bindings
from manus_jax.config.settings import TrainSettings
from manus_jax.training.run_directory import RunDirectory, write_atomically

Sink = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its metrics."""


def check_sinks(train: TrainSettings) -> None:
    """ConfigError where a sink is asked for whose library is not installed."""
    if train.tensorboard:
        _library("tensorboardX", "train.tensorboard")
    if train.wandb_project:
        _library("wandb", "train.wandb_project")


@contextlib.contextmanager
def open_sinks(train: TrainSettings, directory: RunDirectory, start: int) -> Iterator[Sink]:
    """One sink that feeds all that are asked for; `start` is the step the run goes on from."""
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if train.tensorboard:
            sinks.append(stack.enter_context(_tensorboard(directory, start)))
        if train.wandb_project:
            sinks.append(stack.enter_context(_wandb(train.wandb_project, directory)))

        def write(step: int, metrics: Mapping[str, float]) -> None:
            for sink in sinks:
                sink(step, metrics)

        yield write


@contextlib.contextmanager
def _tensorboard(directory: RunDirectory, start: int) -> Iterator[Sink]:
    # TensorBoard reads the files of a folder in the order of their names, which begin with the
    # second they were opened in; then comes the suffix.
    writer = _library("tensorboardX", "train.tensorboard").SummaryWriter(
        str(directory.path / "tensorboard"),
        purge_step=start + 1 if start else 0,
        filename_suffix=f".{start:08d}",
    )

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    with contextlib.closing(writer):
        yield write


@contextlib.contextmanager
def _wandb(project: str, directory: RunDirectory) -> Iterator[Sink]:
    """wandb drops a step that is not beyond the last one it has, so it keeps what came first."""
    wandb = _library("wandb", "train.wandb_project")
    # A name of its own, kept with the run: a new run in a directory of the same name is another.
    kept = directory.path / "wandb_run_id"
    if not kept.exists():
        write_atomically(kept, uuid.uuid4().hex)
    text = (directory.path / "config.gin").read_text()
    try:
        run = wandb.init(
            project=project,
            id=kept.read_text(),
            resume="allow",
            name=directory.path.resolve().name,
            dir=str(directory.path),
            config={name: repr(value) for name, value in read_bindings(text).items()},
        )
    except wandb.Error as error:
        raise ConfigError(
            f"train.wandb_project = {project!r}: wandb cannot start: {error}. WANDB_MODE=offline "
            "keeps its files in the run directory"
        ) from error
    with run:
        yield lambda step, metrics: run.log(dict(metrics), step=step)


def _library(name: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{setting} is set and {name} is not installed: pip install {name}, or leave it unset"
        ) from None
