"""What a run has written so far, read without disturbing it.

The run may still be going: a line that is being written is no line yet, and a file that is not
there is an empty one. Only a directory without metrics is no run.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manus_jax.config.run_config import read_bindings
from manus_jax.training.run_directory import RunDirectoryError


@dataclasses.dataclass(frozen=True)
class RunData:
    path: Path
    config: str  # config.gin; empty where there is none
    metrics: tuple[Mapping[str, float], ...]  # one per step, in order, the key "step" included
    unreadable: int  # lines of metrics.jsonl that are no metrics
    written: float  # when metrics.jsonl was last written, in seconds since 1970

    @property
    def bindings(self) -> dict[str, str]:
        return {name: repr(value) for name, value in read_bindings(self.config).items()}


def read_run(path: Path) -> RunData:
    """Reads a run's directory; RunDirectoryError says why a directory is none."""
    metrics_file = path / "metrics.jsonl"
    if not metrics_file.is_file():
        raise RunDirectoryError(_why_not(path))
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
    """The finite numbers of every step, and how many lines could not be read.

    Lines of the same step are one step; what the later one says counts.
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
        return f"{path} does not exist; give the directory of a run, its train.run_dir"
    if not path.is_dir():
        return f"{path} is a file; give the directory of a run, its train.run_dir"
    below = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
    hint = f"; there are runs in it: {', '.join(below[:5])}" if below else ""
    return f"{path} is not the directory of a run: it has no metrics.jsonl{hint}"
