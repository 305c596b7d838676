"""The HTML report: data, style and script in one self-contained file.

Text from models and environments is untrusted. It is embedded as JSON with HTML-significant
characters escaped, inserted as text nodes only, and the page's content security policy forbids
other scripts and all requests.
"""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manus_jax.files import write_atomically
from manus_jax.reporting import curves, episodes
from manus_jax.reporting.diagnoses import Diagnostician
from manus_jax.reporting.run_data import ReportError, RunData, read_run
from manus_jax.reporting.run_timeline import read_timeline

_SCRIPTS = ("elements.js", "charts.js", "time.js", "timeline.js", "episodes.js", "main.js")


def write_report(
    run: Path, out: Path | None = None, warn: Callable[[str], None] = lambda problem: None
) -> Path:
    """Writes the report of a run directory to `out`, by default its `report.html`.

    `warn` is called with each problem of the run's files, which the page also shows.
    """
    run = run.expanduser()
    out = run / "report.html" if out is None else out.expanduser()
    data = report_data(run)
    for problem in data["run"]["problems"]:
        warn(problem)
    return write_page(out, render(data))


def write_page(out: Path, text: str) -> Path:
    try:
        write_atomically(out, text)
    except OSError as error:
        raise ReportError(f"the report {out} cannot be written: {error.strerror}") from None
    return out


def report_data(run: Path) -> dict[str, Any]:
    """The data of the page as JSON; numbers that are not finite are null."""
    data = read_run(run)
    series = curves.all_series(data.metrics)
    # Most metrics have the same steps, so each distinct list of steps is stored once.
    axes = {axis: i for i, axis in enumerate(dict.fromkeys(tuple(s) for s, _ in series.values()))}
    browser = episodes.browser_data(run)
    problems = [*data.problems, *browser.pop("problems")]
    if data.unreadable:
        problems.append(f"{data.unreadable} lines of metrics.jsonl could not be parsed")
    timeline = read_timeline(run, problems)
    report = {
        "run": _facts(data) | {"problems": problems},
        "axes": [list(axis) for axis in axes],
        "series": {n: [axes[tuple(steps)], values] for n, (steps, values) in series.items()},
        "charts": curves.charts(series),
        "phases": curves.phases(data.metrics),
        "timeline": timeline,
        "environments": curves.environments(data.metrics),
        "findings": [
            {"step": found.step, "last": found.last, "text": found.text}
            for found in Diagnostician(data.metrics).findings
        ],
        "episodes": browser,
        "config": data.config,
    }
    return without_non_finite(report)


def without_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _facts(data: RunData) -> dict[str, Any]:
    bindings = data.bindings
    total = bindings.get("train.total_steps") or bindings.get("sft.total_steps")
    return {
        "name": data.path.resolve().name,
        "step": data.metrics[-1]["step"] if data.metrics else None,
        "total_steps": int(total) if total and total.isdecimal() else None,
        "written": data.written,
        "seconds": sum(line.get("timing_s/step", 0.0) for line in data.metrics),
        "episodes": sum(line.get("rollout/episodes", 0.0) for line in data.metrics),
        "recipe": bindings.get("algorithm.recipe", "").strip("'\""),
    }


def render(data: dict[str, Any], scripts: Sequence[str] = _SCRIPTS) -> str:
    """The page that the scripts build from the data, as ASCII text."""
    script = "\n".join(curves.asset(name) for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "TITLE": html.escape(data["run"]["name"]).encode("ascii", "xmlcharrefreplace").decode(),
        "SCRIPT_HASH": f"sha256-{digest}",
        "STYLE": curves.asset("report.css"),
        "DATA": script_safe_json(data),
        "SCRIPT": script,
    }
    # A single pass, so that placeholders inside inserted text are not replaced.
    return re.sub(r"\{\{([A-Z_]+)\}\}", lambda match: parts[match[1]], curves.asset("report.html"))


def script_safe_json(data: Any) -> str:
    """JSON that can neither end a script element nor open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
