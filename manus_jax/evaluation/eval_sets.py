"""Which tasks an evaluation plays: a fixed panel, the same for every policy and on every machine.

The one idea: tasks are taken in the order of a hash of their names, which knows nothing of
difficulty, while items are often sorted by it; and a larger panel contains the smaller one.
"""

import dataclasses
from collections.abc import Sequence

from envs import registry
from envs.game import GameError
from envs.items import evaluation_order
from manus_jax.agentgym.table import environment
from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import EnvSettings
from manus_jax.data.tasks import Task, read_tasks
from manus_jax.rollout.trajectory import EpisodeSpec, episode_specs


@dataclasses.dataclass(frozen=True)
class Panel:
    """Tasks, each to be played `samples` times."""

    tasks: tuple[Task, ...]
    samples: int = 1

    def specs(self) -> list[EpisodeSpec]:
        return episode_specs(self.tasks, self.samples, "val/")

    @property
    def environments(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task.env for task in self.tasks if task.env is not None))


def drawn(env: str, items: Sequence[int], count: int) -> list[Task]:
    """At most `count` of the items, in the order of their hashes."""
    return [Task(env, item, f"{env}_{item}") for item in evaluation_order(env, items)[:count]]


def split_tasks(env: str, split: str, count: int) -> list[Task]:
    """Tasks of a split ("train", "test") of an environment that is served here."""
    try:
        return drawn(env, registry.load(env).items(split), count)
    except (registry.UnknownEnvironment, GameError) as error:
        raise ConfigError(str(error)) from None


def served_tasks(env: str, count: int) -> list[Task]:
    """Tasks of an environment on AgentGym's own servers, which know no splits."""
    items = environment(env).items
    if items is None:
        raise ConfigError(
            f"how many items the {env} servers of env.urls have is not known: name tasks in files"
        )
    return drawn(env, items, count)


def listed_tasks(files: Sequence[str], envs: Sequence[str], count: int | None = None) -> list[Task]:
    """The first `count` tasks of each environment in the files, which must have some of each."""
    tasks = read_tasks(files)
    stray = next((task for task in tasks if task.env not in envs), None)
    if stray is not None:
        raise ConfigError(
            f"task {stray.item_id} is of environment {stray.env!r}, and env.names has only "
            f"{', '.join(envs)}"
        )
    chosen: list[Task] = []
    for env in envs:
        mine = [task for task in tasks if task.env == env]
        if not mine:
            raise ConfigError(f"no task of {env} is in {', '.join(files)}; take it from env.names")
        chosen += mine[:count]
    return chosen


def make_panel(
    env: EnvSettings,
    count: int,
    files: Sequence[str] = (),
    split: str = "test",
    samples: int = 1,
) -> Panel:
    """At most `count` tasks of every environment, from files, splits or AgentGym's ranges."""
    if files:
        return Panel(tuple(listed_tasks(files, env.names, count)), samples)
    tasks = [
        task
        for name in env.names
        for task in (
            served_tasks(name, count) if name in env.urls else split_tasks(name, split, count)
        )
    ]
    return Panel(tuple(tasks), samples)
