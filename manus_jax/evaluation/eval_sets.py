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


def listed_tasks(files: Sequence[str], envs: Sequence[str], count: int | None = None) -> list[Task]:
    """The first `count` tasks of each environment in the files, at least one of each."""
    tasks = read_tasks(files)
    stray = next((task for task in tasks if task.env not in envs), None)
    if stray is not None:
        raise ConfigError(
            f"task {stray.item_id} belongs to environment {stray.env!r}, which is not in env.names "
            f"({', '.join(envs)})"
        )
    chosen: list[Task] = []
    for env in envs:
        mine = [task for task in tasks if task.env == env]
        if not mine:
            raise ConfigError(f"{', '.join(files)}: no task of {env}; remove it from env.names")
        chosen += mine[:count]
    return chosen


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
    if files:
        return EvalSet(tuple(listed_tasks(files, env.names, count)), samples)
    tasks: list[Task] = []
    for name in env.names:
        source = served_tasks if name in env.urls and not own_items else split_tasks
        tasks += source(name, split, count)
    return EvalSet(tuple(tasks), samples)
