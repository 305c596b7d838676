"""Evaluation results as a table for the terminal."""

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from manus_jax.evaluation.play import EvaluationResult, Summary
from manus_jax.evaluation.statistics import Estimate


def comparison_table(results: Mapping[str, EvaluationResult], samples: int) -> Table:
    """One row per policy and environment, plus one over all environments if there are several."""
    table = Table(title="Means over tasks with 95% intervals", title_justify="left")
    several = f" avg@{samples}" if samples > 1 else ""
    for name in ("policy", "environment"):
        table.add_column(name)
    numbers = ["tasks", f"success{several}", f"score{several}"]
    numbers += [f"pass@{samples}"] if samples > 1 else []
    for name in (*numbers, "turns", "invalid", "failed"):
        table.add_column(name, justify="right")
    for policy, result in results.items():
        rows = dict(result.environments)
        if len(rows) > 1:
            rows["all"] = result.overall
        for number, (env, summary) in enumerate(rows.items()):
            shown = escape(policy) if number == 0 else ""
            table.add_row(shown, env, *_cells(summary, samples), end_section=env == [*rows][-1])
    return table


def _cells(summary: Summary, samples: int) -> list[str]:
    rate = summary.success_rate
    cells = ["0" if rate is None else str(rate.tasks), _interval(rate), _interval(summary.score)]
    if samples > 1:
        cells.append(_interval(summary.pass_at.get(samples)))
    cells += [f"{summary.turns:.1f}", f"{summary.invalid_action_rate:.1%}"]
    return [*cells, str(sum(summary.failed.values()))]


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.2f}…{estimate.high:.2f})"
