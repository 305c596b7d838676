"""The data of a run, read while it may still be running, or after it was damaged.

Missing files are treated as empty. What cannot be read is skipped and reported in `problems`. Only
a directory without any file of a run is an error.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manus_jax.config.binding import ConfigError
from manus_jax.config.run_config import read_bindings
from manus_jax.errors import UserError
from manus_jax.files import open_file

LINE_BYTES = 64 << 20
CONFIG_BYTES = 1 << 20
_SIGNS = ("metrics.jsonl", "config.gin", "status.json", "trajectories")


class ReportError(UserError, ValueError):
    """A directory has no run to report, or the report cannot be written."""


@dataclasses.dataclass(frozen=True)
class RunData:
    path: Path
    config: str  # config.gin; empty if it does not exist
    bindings: Mapping[str, str]  # of the config, as text; none if it is damaged
    metrics: tuple[Mapping[str, float], ...]  # one per step, in order, including the key "step"
    unreadable: int  # lines of metrics.jsonl that could not be parsed
    written: float  # modification time of metrics.jsonl, in seconds since 1970
    problems: list[str]  # what else could not be read


def read_run(path: Path) -> RunData:
    """Reads a run directory; raises ReportError if it is not one."""
    if not any((path / name).exists() for name in _SIGNS):
        raise ReportError(_why_not(path))
    problems: list[str] = []
    config, bindings = _read_config(path / "config.gin", problems)
    metrics_file = path / "metrics.jsonl"
    metrics: tuple[Mapping[str, float], ...] = ()
    unreadable = 0
    try:
        if metrics_file.exists():
            metrics, unreadable, not_finite = read_metrics(metrics_file)
            if not_finite:
                problems.append(f"{not_finite} values of metrics.jsonl are not finite numbers")
    except OSError as error:
        problems.append(f"metrics.jsonl cannot be read: {error}")
    written = (metrics_file if metrics_file.exists() else path).stat().st_mtime
    return RunData(path, config, bindings, metrics, unreadable, written, problems)


def read_metrics(path: Path) -> tuple[tuple[Mapping[str, float], ...], int, int]:
    """The finite values of every step, the unreadable lines, and the values that are not finite.

    Lines of the same step are merged; later values win.
    """
    steps: dict[int, dict[str, float]] = {}
    unreadable = not_finite = 0
    for line in lines_of(path):
        try:
            record = json.loads(line)
            step = int(record["step"])
            values = {name: float(x) for name, x in record.items() if _is_number(x)}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            unreadable += 1
            continue
        finite = {name: x for name, x in values.items() if math.isfinite(x)}
        not_finite += len(values) - len(finite)
        steps.setdefault(step, {}).update(finite | {"step": float(step)})
    return tuple(steps[step] for step in sorted(steps)), unreadable, not_finite


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file; of a line that is too long, the first LINE_BYTES."""
    with open_file(path) as file:
        while line := file.readline(LINE_BYTES):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(LINE_BYTES)
            yield line


def _read_config(path: Path, problems: list[str]) -> tuple[str, dict[str, str]]:
    if not path.exists():
        return "", {}
    try:
        with open_file(path) as file:
            text = file.read(CONFIG_BYTES).decode("utf-8", "replace")
    except OSError as error:
        problems.append(f"config.gin cannot be read: {error}")
        return "", {}
    try:
        return text, {name: repr(value) for name, value in read_bindings(text).items()}
    except (ConfigError, RecursionError, MemoryError) as error:
        problems.append(f"config.gin is damaged: {error}")
        return text, {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _why_not(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist; give a run directory (train.run_dir)"
    if not path.is_dir():
        return f"{path} is a file; give a run directory (train.run_dir)"
    below = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
    hint = f"; it contains the runs {', '.join(below[:5])}" if below else ""
    return f"{path} is not a run directory: it has no metrics.jsonl{hint}"
