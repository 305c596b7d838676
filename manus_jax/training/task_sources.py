"""The training tasks of a run by source and its held-out tasks, of files or of environments."""

from pathlib import Path

from manus_jax.config.settings import DataSettings, EnvSettings
from manus_jax.data.tasks import Task, read_tasks, without
from manus_jax.evaluation.eval_sets import EvalSet, make_eval_set, playable_tasks, split_tasks

Sources = list[tuple[str, list[Task], float]]
"""Names, tasks and weights."""


def read_task_sources(
    data: DataSettings, env: EnvSettings, val_tasks: int
) -> tuple[Sources, EvalSet]:
    """The weighted sources of training tasks, and the evaluation set of held-out tasks."""
    # Without training files, training has checked that all servers have these items.
    own_items = not data.train_files
    eval_set = make_eval_set(env, val_tasks, data.val_files, own_items=own_items)
    if not data.train_files:
        every = 10**9
        sources = [(name, split_tasks(name, "train", every), 1.0) for name in env.names]
        return sources, eval_set
    held_out = read_tasks(data.val_files) if data.val_files else []
    sources = []
    playable = playable_tasks(data.train_files, env)
    for index, (path, listed) in enumerate(zip(data.train_files, playable, strict=True)):
        tasks = without(listed, held_out)
        weight = data.train_weights[index] if data.train_weights else float(max(1, len(tasks)))
        sources.append((f"{index}:{Path(path).name}", tasks, weight))
    return sources, eval_set
