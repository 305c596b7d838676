"""Evaluation sets: fixed tasks, the same for every policy and on every machine.

Items of an environment are often sorted by difficulty, so tasks are selected in the order of a hash
of their names, which is unrelated to difficulty. A larger set contains the smaller ones.
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
from manus_jax.limits import shown
from manus_jax.rollout.trajectory import EpisodeSpec, episode_specs


@dataclasses.dataclass(frozen=True)
class EvalSet:
    """Tasks, each played `samples` times."""

    tasks: tuple[Task, ...]
    samples: int = 1

    def specs(self) -> list[EpisodeSpec]:
        return episode_specs(self.tasks, self.samples, "val/")

    @property
    def environments(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task.env for task in self.tasks if task.env is not None))


def select(env: str, items: Sequence[int], count: int) -> list[Task]:
    """At most `count` of the items, in the order of their hashes."""
    return [Task(env, item, f"{env}_{item}") for item in evaluation_order(env, items)[:count]]


def split_tasks(env: str, split: str, count: int) -> list[Task]:
    """Tasks from a split ("train", "test") of an environment in `envs/`."""
    try:
        return select(env, registry.load(env).items(split), count)
    except (registry.UnknownEnvironment, GameError) as error:
        raise ConfigError(str(error)) from None


def served_tasks(env: str, split: str, count: int) -> list[Task]:
    """Tasks of an environment on servers in env.urls; AgentGym's own items have no splits."""
    row = environment(env)
    if row.shares_items and env in registry.ENVIRONMENTS:
        return split_tasks(env, split, count)
    if row.items is None:
        raise ConfigError(
            f"the items of the {env} servers in env.urls are unknown: list their tasks in files "
            f"(data.val_files or evaluate.task_files), e.g. {env}_0 and {env}_1; "
            f"`python -m envs.items {env} --out DIR` writes those of this project's servers"
        )
    return select(env, row.items, count)


def playable_tasks(files: Sequence[str], env: EnvSettings) -> list[list[Task]]:
    """The tasks of each file; raises for the first row that cannot be played.

    Together the files have a task of every environment.
    """
    limits = {name: _item_count(name) for name in env.names if name not in env.urls}
    found: list[list[Task]] = []
    for file in files:
        found.append(read_tasks(file))
        for row, task in enumerate(found[-1]):
            if task.env not in env.names:
                raise ConfigError(
                    f"{file} row {row}: task {shown(task.item_id)} belongs to environment "
                    f"{shown(task.env)}, which is not in env.names ({', '.join(env.names)})"
                )
            limit = limits.get(task.env)
            if limit is not None and task.item is not None and task.item >= limit:
                raise ConfigError(
                    f"{file} row {row}: {task.env} has no item {task.item}; its items are 0 to "
                    f"{limit - 1}"
                )
    for name in env.names:
        if all(task.env != name for tasks in found for task in tasks):
            raise ConfigError(f"{', '.join(files)}: no task of {name}; remove it from env.names")
    return found


def _item_count(env: str) -> int | None:
    """How many items the embedded environment has, if it can tell."""
    try:
        count = registry.load(env).item_count
        return count and count()
    except (registry.UnknownEnvironment, GameError) as error:
        raise ConfigError(str(error)) from None


def make_eval_set(
    env: EnvSettings,
    count: int,
    files: Sequence[str] = (),
    split: str = "test",
    samples: int = 1,
    own_items: bool = False,
) -> EvalSet:
    """At most `count` tasks per environment, from files, splits or AgentGym's item ranges.

    `own_items`: the servers in env.urls are known to have the items of `envs/`.
    """
    tasks: list[Task] = []
    if files:
        listed = [task for each in playable_tasks(files, env) for task in each]
        for name in env.names:
            tasks += [task for task in listed if task.env == name][:count]
        return EvalSet(tuple(tasks), samples)
    for name in env.names:
        source = served_tasks if name in env.urls and not own_items else split_tasks
        tasks += source(name, split, count)
    return EvalSet(tuple(tasks), samples)
