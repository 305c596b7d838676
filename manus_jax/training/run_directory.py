"""A run's directory: its config, metrics, model card, checkpoints and exports.

The same command on the same directory goes on where the run stopped. A directory that belongs to
another configuration is refused, with what differs. Settings that only say how long to run, how
often to save, on which devices and hosts or where the servers are may change between two starts.
Of several processes only the first writes here; the others know where things are. Two commands do
not write to one directory at a time: the second is refused.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from manus_jax.errors import UserError

# Bindings that leave the run's mathematics as it is.
_MAY_CHANGE = re.compile(
    r"^(mesh\.\w+|distributed\.\w+|engine\.(slots|max_steps)|env\.(urls|servers_per_env)|"
    r"vllm\.\w+|env_pool\.\w+|"
    r"\w+\.(run_dir|total_steps|save_freq|test_freq|keep_checkpoints|export|next_command|"
    r"tensorboard|wandb_project))$"
)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class RunDirectoryError(UserError, ValueError):
    """A run directory that cannot be used, with the reason."""


class RunDirectory:
    def __init__(self, path: str | Path, operative_config: str):
        """Creates or opens `path`; raises when it holds another configuration's run."""
        self.path = Path(path).expanduser()
        self._metrics = self.path / "metrics.jsonl"
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
            config = self.path / "config.gin"
            if config.exists():
                _refuse_changes(config.read_text(), operative_config, self.path)
            write_atomically(config, operative_config)
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {self.path} cannot be written: {error}"
            ) from None

    @property
    def model(self) -> Path:
        """The model card: config and tokenizer, without weights."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def warm_start(self) -> Path:
        """The run that fine-tunes the model before the first step."""
        return self.path / "warm_start"

    def export(self, step: int) -> Path:
        return self.path / "export" / str(step)

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """One JSON object per line; on disk when this returns."""
        if not self._writes:
            return
        with self._metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines that are whole; a kill may have cut the last one short."""
        if not self._metrics.exists():
            return []
        lines = []
        for line in self._metrics.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
        return lines

    def forget_metrics_after(self, step: int) -> None:
        """Drops lines of later steps: a resumed run writes them again."""
        if not self._writes:
            return
        kept = [json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step]
        write_atomically(self._metrics, "".join(kept))


def _lock(path: Path) -> TextIO:
    """An open file whose lock keeps other processes out; it goes with the file, or a `kill -9`."""
    file = (path / ".lock").open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise RunDirectoryError(
                f"another process is at work in {path}: wait for its end, or choose another run_dir"
            ) from None
        # Some file systems have no locks; then nothing is known of others.
    return file


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A disk that is full or gone within the block is a RunDirectoryError, in one line."""
    try:
        yield
    except Exception as error:  # libraries wrap what the system said, or only quote it
        reason = _disk_reason(error)
        if reason is None:
            raise
        raise RunDirectoryError(
            f"{path} cannot be written any more: {reason}. What was saved is whole: make room, and "
            "the same command goes on from the last checkpoint"
        ) from error


def _disk_reason(error: BaseException | None) -> str | None:
    """What the system said of the disk, if that is what an error comes from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK:
            return str(error)
        said = next((os.strerror(n) for n in _DISK if os.strerror(n) in str(error)), None)
        if said is not None:
            return said
        error = error.__cause__ or error.__context__
    return None


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never half of it."""
    work = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    work.write_text(text)
    work.replace(path)


def gin_bindings(text: str) -> dict[str, str]:
    """The bindings of a gin file as it was written, values as text on one line."""
    joined = text.replace("\\\n", " ")
    pairs = re.findall(r"^([\w./]+) = *((?:.*)(?:\n[ \t]+.*)*)", joined, flags=re.MULTILINE)
    return {name: " ".join(value.split()) for name, value in pairs}


def _refuse_changes(old: str, new: str, path: Path) -> None:
    before, after = gin_bindings(old), gin_bindings(new)
    changed = [
        f"{name} was {before.get(name, 'not set')} and is {after.get(name, 'not set')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and not _MAY_CHANGE.match(name)
    ]
    if changed:
        raise RunDirectoryError(
            f"{path} holds a run of another configuration: {'; '.join(changed)}. "
            "Choose another run_dir, or the old settings"
        )
