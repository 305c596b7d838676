"""The summary printed at the end of a run: validation results, sample episodes and file paths.

It is built from the run directory alone, so that a resumed run prints the same summary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from manus_jax.rollout.trajectory import Trajectory, trajectories
from manus_jax.rollout.trajectory_files import read_trajectories
from manus_jax.training.run_directory import RunDirectory

_COLUMNS = {
    "success_rate": "success",
    "score": "score",
    "turns": "turns",
    "invalid_action_rate": "invalid actions",
}
_SHOWN_CHARACTERS = 400


def validation_file(step: int) -> str:
    """The file name of a validation's episodes in `trajectories/`, without suffix."""
    return f"val_{step}"


def print_summary(directory: RunDirectory, baselines: tuple[str, ...], next_command: str) -> None:
    """Prints the table, three episodes, the paths and, if not empty, the `next_command`."""
    console = Console()
    lines = [line for line in directory.metrics() if "val/success_rate" in line]
    if lines:
        console.print(progress_table(lines[0], lines[-1], baselines))
        try:
            for episode in _sample_episodes(directory, int(lines[-1]["step"])):
                console.print(_episode(episode))
        except (OSError, ValueError) as error:  # a finished run stays finished
            console.print(f"no sample episodes: {error}", soft_wrap=True, markup=False)
    exports = (path for path in directory.path.glob("export/*") if path.name.isdecimal())
    paths = {
        "metrics": directory.path / "metrics.jsonl",
        "trajectories": directory.path / "trajectories",
        "report": directory.path / "report.html",
        "model": max(exports, key=lambda p: int(p.name), default=None),
    }
    for name, path in paths.items():
        if path is not None and path.exists():
            console.print(f"{name:12s} {path}", highlight=False, soft_wrap=True, markup=False)
    if next_command:
        console.print(f"{'next':12s} {next_command}", highlight=False, soft_wrap=True, markup=False)


def progress_table(
    first: Mapping[str, Any], last: Mapping[str, Any], baselines: tuple[str, ...]
) -> Table:
    """A table of validation results before and after training, and of the baselines."""
    table = Table(title="On the held-out tasks", title_justify="left")
    table.add_column("policy")
    for title in _COLUMNS.values():
        table.add_column(title, justify="right")
    rows = {
        f"before training (step {first['step']})": (first, "val"),
        f"after training (step {last['step']})": (last, "val"),
        **{name: (first, f"val_{name}") for name in baselines},
    }
    for name, (line, prefix) in rows.items():
        values = [line.get(f"{prefix}/{column}") for column in _COLUMNS]
        table.add_row(name, *(f"{v:.3f}" if isinstance(v, int | float) else "–" for v in values))
    return table


def _sample_episodes(directory: RunDirectory, step: int) -> list[Trajectory]:
    """Three episodes: two successes and one failure if possible, the longest first."""
    path = directory.path / "trajectories" / f"{validation_file(step)}.jsonl"
    if not path.exists():
        return []
    played = trajectories(list(read_trajectories(path)))
    played.sort(key=lambda t: -len(t.turns))  # stable sort: equal lengths keep their order
    won = [t for t in played if t.success]
    lost = [t for t in played if not t.success]
    return [*won[:2], *lost[:1], *won[2:], *lost[1:]][:3]


def _episode(trajectory: Trajectory) -> RenderableType:
    outcome = "won" if trajectory.success else f"not won ({trajectory.end_reason})"
    title = f"{trajectory.task.item_id}: {outcome}, reward {trajectory.episode_reward:.3f}"
    return Panel(Group(*_turns(trajectory)), title=escape(title), title_align="left")


def _turns(trajectory: Trajectory) -> Iterator[Text]:
    yield Text(_shortened(trajectory.first_observation), style="dim")
    for turn in trajectory.turns:
        yield Text(f"▶ {_shortened(turn.text)}", style="bold")
        yield Text(_shortened(turn.observation), style="dim")


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} …"
