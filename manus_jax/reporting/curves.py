"""Charts of metrics: grouping into charts, downsampling, time per phase, validation tables.

`assets/charts.toml` defines the charts. Metrics that match none of them can be selected on the page
by name.
"""

import functools
import importlib.resources
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

MAX_POINTS = 3000  # per curve
MAX_BARS = 120
Metrics = Sequence[Mapping[str, float]]
Series = dict[str, tuple[list[int], list[float]]]


def all_series(metrics: Metrics) -> Series:
    """Steps and values of every metric, at most MAX_POINTS each."""
    series: Series = {}
    for line in metrics:
        for name, value in line.items():
            if name not in ("step", "training/global_step"):
                steps, values = series.setdefault(name, ([], []))
                steps.append(int(line["step"]))
                values.append(float(f"{value:.6g}"))
    return {name: downsampled(*points, MAX_POINTS) for name, points in series.items()}


def downsampled(steps: list[int], values: list[float], limit: int) -> tuple[list[int], list[float]]:
    """At most `limit` points: both ends, and the minimum and maximum of every interval."""
    count = len(steps)
    if count <= limit:
        return steps, values
    kept = {0, count - 1}
    intervals = (limit - 2) // 2
    for i in range(intervals):
        interval = range(1 + i * (count - 2) // intervals, 1 + (i + 1) * (count - 2) // intervals)
        kept |= {min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)}
    return [steps[i] for i in sorted(kept)], [values[i] for i in sorted(kept)]


def charts(series: Series, sections: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The charts that have data, of all `sections` or some."""
    found = []
    for section, title, chart in _definitions():
        if sections is not None and section not in sections:
            continue
        lines: dict[str, str] = {}
        for pattern, label in chart.items():
            for name in series if pattern != "range" else ():
                match = re.fullmatch(pattern, name)
                if match and not any(series[name] == series[other] for other in lines):
                    lines[name] = match.expand(label)
        # A baseline alone has nothing to be compared with, nor has a single environment.
        if sum(not _is_baseline(name) for name in lines) > (section == "Environments"):
            drawn = [
                {"metric": name, "label": label, "level": _is_baseline(name)}
                for name, label in lines.items()
            ]
            range_ = {"range": chart["range"]} if "range" in chart else {}
            found.append({"section": section, "title": title, "lines": drawn} | range_)
    return found


@functools.cache
def _definitions() -> list[tuple[str, str, dict[str, Any]]]:
    """(section, title, chart) in the order of the page."""
    sections = tomllib.loads(asset("charts.toml"))
    return [(s, title, chart) for s, charts in sections.items() for title, chart in charts.items()]


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    folder = importlib.resources.files("manus_jax.reporting") / "assets"
    return (folder / name).read_text(encoding="ascii")


def _is_baseline(name: str) -> bool:
    return name.startswith("val_")


def phases(metrics: Metrics) -> dict[str, Any]:
    """Mean seconds per step by phase, over intervals of steps; they sum to the step time.

    `totals` are the seconds per phase of the whole run, in the order of `names`.
    """
    timed = [line for line in metrics if "timing_s/step" in line]
    names = list(dict.fromkeys(name for line in timed for name in line if _is_phase(name)))
    size = max(1, -(-len(timed) // MAX_BARS))
    bars: list[dict[str, Any]] = []
    for start in range(0, len(timed), size):
        chunk = timed[start : start + size]
        seconds = [sum(line.get(name, 0.0) for line in chunk) / len(chunk) for name in names]
        whole = sum(line["timing_s/step"] for line in chunk) / len(chunk)
        steps = [int(chunk[0]["step"]), int(chunk[-1]["step"])]
        # The last entry is time outside all phases; a run without phases has no other entry.
        bars.append({"steps": steps, "seconds": [*seconds, max(0.0, whole - sum(seconds))]})
    totals = [sum(line.get(name, 0.0) for line in timed) for name in names]
    whole = sum(line["timing_s/step"] for line in timed)
    totals.append(max(0.0, whole - sum(totals)))
    short = [name.removeprefix("timing_s/") for name in names] + ["step" if not names else "rest"]
    if totals[-1] <= 1e-6 * whole:  # rounding
        short, totals = short[:-1], totals[:-1]
        bars = [bar | {"seconds": bar["seconds"][:-1]} for bar in bars]
    return {"names": short, "totals": totals, "bars": bars, "per_bar": size}


def _is_phase(name: str) -> bool:
    """Whether the metric is a phase of a step; idle times are parts of phases."""
    return (
        name.startswith("timing_s/")
        and name != "timing_s/step"
        and not name.startswith("timing_s/idle_")
    )


def environments(metrics: Metrics, measure: str = "success_rate") -> list[dict[str, Any]]:
    """Validation results per environment, followed by the overall row if there are several.

    `first`, `last` and `baselines` are of the `measure`.
    """
    pattern = re.compile(rf"val/(?:([^/]+)/)?{re.escape(measure)}")
    names = dict.fromkeys(
        match[1] for line in metrics for name in line if (match := pattern.fullmatch(name))
    )
    named = [name for name in names if name is not None]
    rows: list[str | None] = [*named, *([None] if len(named) != 1 and None in names else [])]
    table = []
    for env in rows:
        below = f"/{env}" if env else ""
        seen = [line for line in metrics if f"val{below}/{measure}" in line]
        rates = [line[f"val{below}/{measure}"] for line in seen]
        baselines = {
            match[1]: value
            for line in metrics
            for name, value in line.items()
            if (match := re.fullmatch(rf"val_([^/]+){re.escape(f'{below}/{measure}')}", name))
        }
        table.append(
            {
                "env": env or "all",
                "first": [int(seen[0]["step"]), rates[0]],
                "last": [int(seen[-1]["step"]), rates[-1]],
                "best": max(rates),
                "score": seen[-1].get(f"val{below}/score"),
                "turns": seen[-1].get(f"val{below}/turns"),
                "baselines": baselines,
            }
        )
    return table
