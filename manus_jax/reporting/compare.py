"""Compares runs: a page with the curves of groups of runs, the table of results, and pictures.

Runs whose configuration differs only in the seed and the run directory form a group. Curves are the
mean of a group with the range of its runs. The table has a row per group and environment with the
success rate, and another one with the score where it differs.
"""

import dataclasses
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manus_jax.config.run_config import default_of
from manus_jax.reporting import curves
from manus_jax.reporting.page import render, without_non_finite, write_page
from manus_jax.reporting.pictures import Curve, Panel, picture
from manus_jax.reporting.run_data import ReportError, RunData, read_run

COLUMNS = (
    *("config", "environment", "recipe", "seeds", "measure", "before", "after", "gain"),
    *("oracle", "random", "episodes", "processor minutes", "peak memory"),
)
MEASURES = {"success": "success_rate", "score": "score"}
_IN_TRAINING = {"success": "episode/success_rate", "score": "episode/env_reward"}
_SCRIPTS = ("elements.js", "charts.js", "compare.js")
_SECTIONS = ("Learning", "Update", "Episodes")
_OF_ONE_RUN = ("train.seed", "train.run_dir", "sft.seed", "sft.run_dir")
_IN_RECIPE = ("algorithm.recipe", "algorithm.shuffle_rewards")


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs with the same configuration, by seed."""

    config: str
    recipe: str
    runs: tuple[RunData, ...]

    @property
    def label(self) -> str:
        count = f" ({len(self.runs)} runs)" if len(self.runs) > 1 else ""
        return f"{self.config}, {self.recipe}{count}" if self.recipe else f"{self.config}{count}"


def write_comparison(
    runs: Sequence[Path], page: Path, markdown: Path | None, images: Path | None = None
) -> list[Path]:
    """Writes the page and, if they are wanted, the table of results and pictures for it."""
    groups = grouped([read_run(run.expanduser()) for run in runs])
    table = table_of(groups)
    written = [write_page(page.expanduser(), render(comparison_data(groups, table), _SCRIPTS))]
    if markdown is not None:
        text = markdown_of(table)
        if images is not None:
            folder = _new_folder(images.expanduser())
            for env, drawing in pictures_of(groups, table).items():
                name = re.sub(r"[^\w-]", "_", env)
                path = write_page(folder / f"{name}.svg", drawing)
                written.append(path)
                link = os.path.relpath(path, markdown.expanduser().parent)
                text += f"\n![{env}: learning curves]({link})\n"
        written.append(write_page(markdown.expanduser(), text))
    return written


def _new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"the folder {folder} cannot be made: {error.strerror}") from None
    return folder


def grouped(runs: Sequence[RunData]) -> list[Group]:
    """The groups in the order of their first runs."""
    members: dict[Any, list[RunData]] = {}
    for run in runs:
        if not run.metrics:
            raise ReportError(f"{run.path} has no metrics to compare")
        # Settings at their defaults are left out, because older runs do not have them all.
        same = {
            name: value
            for name, value in run.bindings.items()
            if name not in _OF_ONE_RUN and value != repr(default_of(name))
        }
        # Without a readable config, a run is compared with no other.
        key = tuple(sorted(same.items())) if run.bindings else run.path
        members.setdefault(key, []).append(run)
    seed = lambda run: int(run.bindings.get("train.seed") or run.bindings.get("sft.seed") or 0)
    groups = [sorted(group, key=seed) for group in members.values()]
    found = [Group(_config_name(group[0]), _recipe(group[0]), tuple(group)) for group in groups]
    names = [(group.config, group.recipe) for group in found]
    # Equal commands can mean different configs, when a file was edited between the runs.
    return [
        group
        if names.count(name) == 1
        else dataclasses.replace(group, config=f"{group.config} ({group.runs[0].path.name})")
        for name, group in zip(names, found, strict=True)
    ]


def _recipe(run: RunData) -> str:
    """The recipe, and whether the run is a control; empty for supervised training."""
    recipe = run.bindings.get("algorithm.recipe", "").strip("'\"")
    shuffled = run.bindings.get("algorithm.shuffle_rewards") == "True"
    return f"{recipe}, shuffled rewards" if shuffled else recipe


def _config_name(run: RunData) -> str:
    """The gin files and bindings of the command that started the run, without its recipe."""
    line = run.config.partition("\n")[0]
    try:
        words = shlex.split(line) if line.startswith("# python -m manus_jax.") else []
    except ValueError:
        words = []
    files = [word.removeprefix("--gin_file=") for word in words if word.startswith("--gin_file=")]
    params = [word.removeprefix("--gin_param=") for word in words if word.startswith("--gin_param")]
    shown_elsewhere = (*_OF_ONE_RUN, *_IN_RECIPE)
    params = [p for p in params if p.partition("=")[0].strip() not in shown_elsewhere]
    return ", ".join([*files, *params]) or run.path.name


def table_of(groups: Sequence[Group]) -> list[list[str]]:
    """The cells of the table; results and costs are means with their range."""
    rows = []
    for group in groups:
        metrics = [run.metrics for run in group.runs]
        costs = [
            _interval([_sum(lines, "rollout/episodes") for lines in metrics], ",.0f"),
            _interval([_largest(lines, "perf/processor_minutes") for lines in metrics], ".1f"),
            _interval([_largest(lines, "perf/max_memory_gb") for lines in metrics], ".1f", " GB"),
        ]
        seeds = ", ".join(run.bindings.get("train.seed", "–") for run in group.runs)
        results: dict[str, dict[str, list[str]]] = {}
        for measure in MEASURES:
            for env, found in _results(group, measure).items():
                results.setdefault(env, {})[measure] = _cells(found)
        for env, by_measure in results.items():
            for measure, cells in by_measure.items():
                if measure == "success" or cells != by_measure.get("success"):
                    named = [group.config, env, group.recipe or "–", seeds, measure]
                    rows.append([*named, *cells, *costs])
    return rows


def _results(group: Group, measure: str) -> dict[str, list[dict[str, Any]]]:
    """The results of the runs by environment (`curves.environments`)."""
    results: dict[str, list[dict[str, Any]]] = {}
    for run in group.runs:
        for row in curves.environments(run.metrics, MEASURES[measure]):
            results.setdefault(row["env"], []).append(row)
    return results


def _cells(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Before, after, gain, oracle, random; the gain is also given as a share of the gap to the
    oracle."""
    before = [row["first"][1] if row["first"][0] == 0 else None for row in found]
    after = [row["last"][1] for row in found]
    oracle, random = (
        [row["baselines"].get(name) for row in found] for name in ("oracle", "random")
    )
    gain = "–"
    known = [values for values in zip(before, after, oracle, strict=True) if values[0] is not None]
    if known:
        mean = lambda values: sum(values) / len(values)
        rise = mean([last - first for first, last, _ in known])
        gain = f"{rise:+.2f}"
        gaps = [best - first for first, _, best in known if best is not None]
        if len(gaps) == len(known) and mean(gaps) > 0:
            gain += f", {rise / mean(gaps):.0%} of the gap"
    form = lambda values: _interval(values, ".2f")
    return [form(before), form(after), gain, form(oracle), form(random)]


def _interval(values: Sequence[float | None], form: str, unit: str = "") -> str:
    """The mean, with lowest and highest value if they differ when written."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean, low, high = (format(x, form) for x in (sum(known) / len(known), min(known), max(known)))
    return f"{mean}{unit}" if low == high else f"{mean}{unit} ({low} to {high})"


def _sum(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    found = [line[name] for line in lines if name in line]
    return sum(found) if found else None


def _largest(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    return max((line[name] for line in lines if name in line), default=None)


def markdown_of(table: Sequence[Sequence[str]]) -> str:
    """The table as Markdown, with configs as code."""
    rows = [[f"`{row[0]}`", *row[1:]] for row in table]
    safe = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *safe]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def pictures_of(groups: Sequence[Group], table: Sequence[Sequence[str]]) -> dict[str, str]:
    """SVG pictures by environment: every measure of the table, on held-out tasks and in training.

    Training metrics are over all environments of a run, so only runs of a single one are drawn.
    """
    drawn = {}
    named, measured = COLUMNS.index("environment"), COLUMNS.index("measure")
    for env in dict.fromkeys(row[named] for row in table):
        measures = {row[measured] for row in table if row[named] == env}
        rows, shown = [], dict[int, int]()  # a group's number in the picture, which is its colour
        for measure in (m for m in MEASURES if m in measures):
            levels: dict[str, list[float]] = {}
            held_out, training = [], []
            for number, group in enumerate(groups):
                results = _results(group, measure)
                if env not in results:
                    continue
                colour = shown.setdefault(number, len(shown))
                runs = [curves.all_series(run.metrics) for run in group.runs]
                name = "val" if env == "all" else f"val/{env}"
                held_out.append(_curve(colour, runs, f"{name}/{MEASURES[measure]}"))
                if len(results) == 1:
                    training.append(_curve(colour, runs, _IN_TRAINING[measure]))
                for row in results[env]:
                    for policy, value in row["baselines"].items():
                        levels.setdefault(policy, []).append(value)
            means = [(policy, sum(found) / len(found)) for policy, found in levels.items()]
            panels = [Panel(f"{env}: {measure} on held-out tasks", held_out, means)]
            if played := [curve for curve in training if curve.steps]:
                panels.append(Panel(f"{measure} in training", played, means))
            rows.append(panels)
        drawn[env] = picture(rows, [groups[number].label for number in shown])
    return drawn


def _curve(colour: int, runs: Sequence[curves.Series], metric: str) -> Curve:
    return Curve(colour, *mean_and_range([run[metric] for run in runs if metric in run]))


def comparison_data(groups: Sequence[Group], table: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The data of the page as JSON."""
    series = [[curves.all_series(run.metrics) for run in group.runs] for group in groups]
    merged = {name: points for group in series for run in group for name, points in run.items()}
    axes: dict[tuple[int, ...], int] = {}
    means: dict[str, list[Any]] = {}
    drawn = []
    for chart in curves.charts(merged, _SECTIONS):
        for line in chart["lines"]:
            lines = []
            for number, group in enumerate(groups):
                of_runs = [run[line["metric"]] for run in series[number] if line["metric"] in run]
                if not of_runs or line["level"]:
                    continue
                steps, mean, low, high = mean_and_range(of_runs)
                name = f"{number}/{line['metric']}"
                means[name] = [axes.setdefault(tuple(steps), len(axes)), mean]
                curve: dict[str, Any] = {"metric": name, "label": group.label, "level": False}
                if len(of_runs) > 1:
                    curve["range"] = {"low": low, "high": high}
                lines.append(curve)
            title = ": ".join(filter(None, (chart["title"], line["label"])))
            if lines:
                drawn.append(chart | {"title": title, "lines": lines})
    problems = [
        f"{run.path.name}: {p}" for group in groups for run in group.runs for p in run.problems
    ]
    return without_non_finite(
        {
            "run": {"name": f"{sum(len(g.runs) for g in groups)} runs", "problems": problems},
            "axes": [list(axis) for axis in axes],
            "series": means,
            "charts": drawn,
            "table": {"columns": list(COLUMNS), "rows": [list(row) for row in table]},
        }
    )


def mean_and_range(
    runs: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, mean, lowest and highest value of (steps, values) over the runs that have a step."""
    values: dict[int, list[float]] = {}
    for steps, points in runs:
        for step, value in zip(steps, points, strict=True):
            values.setdefault(step, []).append(value)
    ordered = sorted(values)
    mean = [sum(values[s]) / len(values[s]) for s in ordered]
    return ordered, mean, [min(values[s]) for s in ordered], [max(values[s]) for s in ordered]
