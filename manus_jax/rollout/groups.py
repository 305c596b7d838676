"""Group filters that select the episodes with a learning signal."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from manus_jax.algorithms.advantages import has_signal
from manus_jax.algorithms.batch_advantages import group_numbers
from manus_jax.rollout.trajectory import Trajectory


def drop_singleton_groups(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """Drops episodes that are the only one of their group: the other members failed."""
    sizes = Counter(e.group_id for e in episodes)
    return [e for e in episodes if sizes[e.group_id] > 1]


def drop_uniform_groups(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """Drops groups whose environment rewards are all equal; reward shaping is not considered."""
    if not episodes:
        return []
    outcomes = np.array([float(e.env_reward) for e in episodes], np.float32)
    groups = group_numbers(np.array([e.group_id for e in episodes], object))
    keep = has_signal(outcomes, groups, np.ones(len(episodes), bool))
    return [e for e, k in zip(episodes, np.asarray(keep), strict=True) if k]
