"""The data of a run, read while it may still be running.

An incomplete last line is skipped, and missing files are treated as empty. Only a directory without
`metrics.jsonl` is an error.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manus_jax.config.binding import ConfigError
from manus_jax.config.run_config import read_bindings
from manus_jax.errors import UserError


class ReportError(UserError, ValueError):
    """A directory has no run to report, or the report cannot be written."""


@dataclasses.dataclass(frozen=True)
class RunData:
    path: Path
    config: str  # config.gin; empty if it does not exist
    metrics: tuple[Mapping[str, float], ...]  # one per step, in order, including the key "step"
    unreadable: int  # lines of metrics.jsonl that could not be parsed
    written: float  # modification time of metrics.jsonl, in seconds since 1970

    @property
    def bindings(self) -> dict[str, str]:
        """The bindings of the config; none if it is damaged."""
        try:
            return {name: repr(value) for name, value in read_bindings(self.config).items()}
        except ConfigError:
            return {}


def read_run(path: Path) -> RunData:
    """Reads a run directory; raises ReportError if it is not one."""
    metrics_file = path / "metrics.jsonl"
    if not metrics_file.is_file():
        raise ReportError(_why_not(path))
    metrics, unreadable = read_metrics(metrics_file)
    config = path / "config.gin"
    return RunData(
        path=path,
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        metrics=metrics,
        unreadable=unreadable,
        written=metrics_file.stat().st_mtime,
    )


def read_metrics(path: Path) -> tuple[tuple[Mapping[str, float], ...], int]:
    """The finite values of every step, and the number of lines that could not be parsed.

    Lines of the same step are merged; later values win.
    """
    steps: dict[int, dict[str, float]] = {}
    unreadable = 0
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError):
            unreadable += 1
            continue
        numbers = {name: float(x) for name, x in record.items() if _is_number(x)}
        steps.setdefault(step, {}).update(numbers | {"step": float(step)})
    return tuple(steps[step] for step in sorted(steps)), unreadable


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _why_not(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist; give a run directory (train.run_dir)"
    if not path.is_dir():
        return f"{path} is a file; give a run directory (train.run_dir)"
    below = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
    hint = f"; it contains the runs {', '.join(below[:5])}" if below else ""
    return f"{path} is not a run directory: it has no metrics.jsonl{hint}"
