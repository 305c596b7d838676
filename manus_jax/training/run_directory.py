"""The directory of a run: its config, metrics, model card, checkpoints and exports.

Running the same command on the same directory resumes the run. If the directory was created with
other settings, an error lists the differences, except for settings that may change
(`config.binding.setting`), such as the number of steps, the devices and the servers. Only process 0
writes here. A lock prevents a second command from writing to the same directory.
"""

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from manus_jax.config.binding import ConfigError
from manus_jax.config.run_config import changed_settings
from manus_jax.errors import UserError
from manus_jax.files import (
    CHECKSUMS,
    lock_directory,
    read_text,
    remove_leftovers,
    remove_unfinished,
    write_atomically,
)
from manus_jax.status import STATUS

_METRICS_SHARE = 0.05  # of the time may be spent on writing metrics.jsonl
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK = (*_FULL, errno.EFBIG, errno.EROFS, errno.EIO)


class RunDirectoryError(UserError, ValueError):
    """A run directory that cannot be used; the message gives the reason."""


class RunDirectory:
    def __init__(self, path: str | Path, operative_config: str):
        """Creates or opens `path`; raises if it contains a run with other settings."""
        self.path = Path(path).expanduser()
        self._metrics = self.path / "metrics.jsonl"
        self._lines: list[str] | None = None  # of metrics.jsonl and what is not yet written to it
        self._unwritten = False
        self._write_at = 0.0
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(self.path)
            for name in ("checkpoints", "export", "model", "trajectories", "warm_start"):
                part = self.path / name
                if (part.exists() or part.is_symlink()) and not part.is_dir():
                    raise RunDirectoryError(f"{part} is not a directory")
                remove_leftovers(part)
            remove_leftovers(self.path)
            remove_unfinished(self.path / "export", CHECKSUMS)
            if self._metrics.exists() and not self._metrics.is_file():
                raise RunDirectoryError(f"{self._metrics} is not a file")
            config = self.path / "config.gin"
            text = read_text(config) if config.exists() else ""
            if text.strip():
                _refuse_changes(text, operative_config, self.path)
            elif any(self.checkpoints.glob("[0-9]*")):
                raise RunDirectoryError(
                    f"{self.path} has checkpoints, but {config} is missing or empty, so their "
                    "settings are unknown: restore the file, or choose another run_dir"
                )
            write_atomically(config, operative_config)
            STATUS.use_directory(self.path)
        except UnicodeDecodeError as error:
            raise RunDirectoryError(f"{config} is not a gin config: {error}") from None
        except OSError as error:
            remedy = "free some space" if error.errno in _FULL else "change its permissions"
            raise RunDirectoryError(
                f"run directory {self.path} cannot be written: {error}; {remedy} or choose another "
                "run_dir"
            ) from None

    @property
    def model(self) -> Path:
        """The model's config and tokenizer, without weights."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def warm_start(self) -> Path:
        """The run directory of the fine-tuning that precedes the first step."""
        return self.path / "warm_start"

    def export(self, step: int) -> Path:
        return self.path / "export" / str(step)

    def merged_export(self, step: int) -> Path:
        """The model with its adapters added, if it is wanted besides them."""
        return self.path / "export" / f"{step}-merged"

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Adds a line of JSON to the file, at once or, if writing it takes long, after a while.

        The file is replaced, because a mounted bucket cannot append to one.
        """
        if not self._writes:
            return
        STATUS.note_metrics(metrics)
        if self._lines is None:
            self._lines = [json.dumps(line) + "\n" for line in self.metrics()]
        self._lines.append(json.dumps(metrics) + "\n")
        self._unwritten = True
        if time.monotonic() >= self._write_at:
            self.flush_metrics()

    def amend_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to the line of an earlier step."""
        if not self._writes:
            return
        lines = [{**line, **metrics} if line["step"] == step else line for line in self.metrics()]
        STATUS.note_validation({"step": step, **metrics})
        self._lines = [json.dumps(line) + "\n" for line in lines]
        self._unwritten = True

    def flush_metrics(self) -> None:
        """Writes all metrics to disk; required before a checkpoint of the same steps."""
        if not self._unwritten:
            return
        assert self._lines is not None
        began = time.monotonic()
        write_atomically(self._metrics, "".join(self._lines))
        self._unwritten = False
        self._write_at = began + (time.monotonic() - began) / _METRICS_SHARE

    @contextlib.contextmanager
    def flushing_metrics(self) -> Iterator[None]:
        """Writes all metrics to disk at the end of the block."""
        try:
            yield
        finally:
            self.flush_metrics()

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of all readable lines."""
        self.flush_metrics()
        if not self._metrics.exists():
            return []
        return [line for line in map(_metrics_line, _lines(self._metrics)) if line is not None]

    def forget_metrics_after(self, step: int) -> None:
        """Drops the lines of later steps, which the resumed run repeats.

        A kill may cut off the last line. If any other line is unreadable, the file is copied first.
        """
        if not self._writes:
            return
        if self._metrics.exists():
            lines = _lines(self._metrics)
            bad = sum(_metrics_line(line) is None for line in lines[:-1])
            if bad:
                copy = self._metrics.with_name("metrics.damaged.jsonl")
                shutil.copy2(self._metrics, copy)
                print(f"{self._metrics} has {bad} damaged lines; a copy of it is {copy}")
        kept = [line for line in self.metrics() if line["step"] <= step]
        for line in kept:
            STATUS.note_metrics(line)
        self._lines = [json.dumps(line) + "\n" for line in kept]
        write_atomically(self._metrics, "".join(self._lines))


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").split("\n")


def _metrics_line(line: str) -> dict[str, Any] | None:
    """The metrics in a line of metrics.jsonl; None if it has none."""
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        return None
    has_step = isinstance(metrics, dict) and type(metrics.get("step")) is int
    return metrics if has_step else None


_RESUME = (
    "Saved checkpoints are intact: free some space, and the same command resumes from the last"
)


@contextlib.contextmanager
def disk_errors(path: Path, advice: str = _RESUME) -> Iterator[None]:
    """Converts disk errors in the block, such as a full disk, to a one-line RunDirectoryError."""
    try:
        yield
    except UserError:  # it says what is wrong
        raise
    except Exception as error:  # libraries wrap the OSError or only include its message
        reason = _disk_reason(error)
        if reason is None:
            raise
        raise RunDirectoryError(f"{path} cannot be written any more: {reason}. {advice}") from error


def _disk_reason(error: BaseException | None) -> str | None:
    """The operating system's message if a disk problem caused the error, else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK:
            return str(error)
        reason = next((os.strerror(n) for n in _DISK if os.strerror(n) in str(error)), None)
        if reason is not None:
            return reason
        error = error.__cause__ or error.__context__
    return None


def _refuse_changes(old: str, new: str, path: Path) -> None:
    try:
        changed = changed_settings(old, new)
    except ConfigError as error:
        raise RunDirectoryError(f"{path / 'config.gin'}: {error}") from None
    if changed:
        raise RunDirectoryError(
            f"{path} holds a run with other settings: {'; '.join(changed)}. "
            "Choose another run_dir, or restore the settings"
        )
