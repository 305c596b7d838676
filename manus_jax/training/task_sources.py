"""The training tasks of a run by source and its held-out tasks, of files or of environments."""

from manus_jax.config.settings import DataSettings, EnvSettings
from manus_jax.data.mixture import Sources, file_sources
from manus_jax.data.tasks import read_tasks, without
from manus_jax.evaluation.eval_sets import EvalSet, make_eval_set, playable_tasks, split_tasks


def read_task_sources(
    data: DataSettings, env: EnvSettings, val_tasks: int
) -> tuple[Sources, EvalSet]:
    """The weighted sources of training tasks, and the evaluation set of held-out tasks."""
    # Without training files, training has checked that all servers have these items.
    own_items = not data.train_files
    eval_set = make_eval_set(env, val_tasks, data.val_files, own_items=own_items)
    held_out = read_tasks(data.val_files) if data.val_files else []
    if not data.train_files:
        every = 10**9
        splits = {name: split_tasks(name, "train", every) for name in env.names}
        return [(name, without(splits[name], held_out), 1.0) for name in env.names], eval_set
    return file_sources(data, playable_tasks(data.train_files, env), held_out), eval_set
