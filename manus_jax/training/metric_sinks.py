"""Metric sinks for TensorBoard and Weights & Biases.

`metrics.jsonl` is authoritative; the sinks receive copies. A resumed run opens each sink at the
step it resumes from, so that no step appears twice.
"""

import contextlib
import importlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from manus_jax.config.binding import ConfigError
from manus_jax.config.run_config import read_bindings
from manus_jax.config.settings import TrainSettings
from manus_jax.files import write_atomically
from manus_jax.training.run_directory import RunDirectory

Sink = Callable[[int, Mapping[str, float]], None]
"""Receives a step and its metrics."""


def check_sinks(train: TrainSettings) -> None:
    """Raises ConfigError for a sink whose library is missing or that cannot be written."""
    if train.tensorboard:
        _library("tensorboardX", "train.tensorboard")
        folder = Path(train.run_dir).expanduser() / "tensorboard"
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"train.tensorboard: {folder} is a file; move it away")
    if train.wandb_project:
        _library("wandb", "train.wandb_project")


@contextlib.contextmanager
def open_sinks(train: TrainSettings, directory: RunDirectory, start: int) -> Iterator[Sink]:
    """One sink that writes to all configured ones; `start` is the step to resume from."""
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
    # TensorBoard reads files in the order of their names, which consist of the time in seconds
    # followed by the suffix.
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
    """A sink for wandb, which ignores steps that it already has and keeps their first values.

    Metrics of an earlier step, of a validation that ended late, are added to the newest one.
    """
    wandb = _library("wandb", "train.wandb_project")
    # A random id stored in the run directory: a new run in the same path gets a new id.
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
            "writes its files to the run directory only"
        ) from error
    newest = 0

    def write(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal newest
        newest = max(newest, step)
        run.log(dict(metrics), step=newest)

    with run:
        yield write


def _library(name: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{setting} is set but {name} is not installed: pip install {name}, or unset it"
        ) from None
