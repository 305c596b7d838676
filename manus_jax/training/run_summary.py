"""What a finished run tells: how far it came, what its agent does now, and where everything is.

Made from the run directory alone, so that a run which was killed and went on tells the same.
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
    """The name, in a run's trajectories, of the episodes of a validation."""
    return f"val_{step}"


def print_closing(directory: RunDirectory, yardsticks: tuple[str, ...], following: str) -> None:
    """Prints the table, three episodes, the paths and the `following` command, if there is one."""
    console = Console()
    lines = [line for line in directory.metrics() if "val/success_rate" in line]
    if lines:
        console.print(progress_table(lines[0], lines[-1], yardsticks))
        for episode in _three(directory, int(lines[-1]["step"])):
            console.print(_episode(episode))
    paths = {
        "metrics": directory.path / "metrics.jsonl",
        "trajectories": directory.path / "trajectories",
        "report": directory.path / "report.html",
        "model": max(directory.path.glob("export/*"), key=lambda p: int(p.name), default=None),
    }
    for name, path in paths.items():
        if path is not None and path.exists():
            console.print(f"{name:12s} {path}", highlight=False, soft_wrap=True, markup=False)
    if following:
        console.print(f"{'next':12s} {following}", highlight=False, soft_wrap=True, markup=False)


def progress_table(
    first: Mapping[str, Any], last: Mapping[str, Any], yardsticks: tuple[str, ...]
) -> Table:
    """Before, after and the yardsticks, on the validation tasks."""
    table = Table(title="On the held-out tasks", title_justify="left")
    table.add_column("policy")
    for title in _COLUMNS.values():
        table.add_column(title, justify="right")
    rows = {
        f"before training (step {first['step']})": (first, "val"),
        f"after training (step {last['step']})": (last, "val"),
        **{name: (first, f"val_{name}") for name in yardsticks},
    }
    for name, (line, prefix) in rows.items():
        values = [line.get(f"{prefix}/{column}") for column in _COLUMNS]
        table.add_row(name, *("–" if v is None else f"{v:.3f}" for v in values))
    return table


def _three(directory: RunDirectory, step: int) -> list[Trajectory]:
    """Two that were won and one that was lost, as far as there are such."""
    path = directory.path / "trajectories" / f"{validation_file(step)}.jsonl"
    if not path.exists():
        return []
    played = trajectories(list(read_trajectories(path)))
    played.sort(key=lambda t: -len(t.turns))  # stable: of equal length in their order
    won = [t for t in played if t.success]
    lost = [t for t in played if not t.success]
    return [*won[:2], *lost[:1], *won[2:], *lost[1:]][:3]


def _episode(trajectory: Trajectory) -> RenderableType:
    outcome = "won" if trajectory.success else f"not won ({trajectory.end_reason})"
    title = f"{trajectory.task.item_id}: {outcome}, reward {trajectory.episode_reward:.3f}"
    return Panel(Group(*_spoken(trajectory)), title=escape(title), title_align="left")


def _spoken(trajectory: Trajectory) -> Iterator[Text]:
    yield Text(_shortened(trajectory.first_observation), style="dim")
    for turn in trajectory.turns:
        yield Text(f"▶ {_shortened(turn.text)}", style="bold")
        yield Text(_shortened(turn.observation), style="dim")


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} …"
