"""The items of ScienceWorld: (task, variation) pairs in AgentGym's numbering.

AgentGym numbers the variations of 23 of the 30 tasks consecutively, in the order of the task ids.
The counts are listed here so that items and splits are known without a simulator. The splits are
ScienceWorld's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from envs.game import GameError, fixed_splits


@dataclass(frozen=True)
class Task:
    """A task. Variations below `train_end` are for training, from `test_start` on for testing."""

    name: str
    variations: int
    train_end: int
    test_start: int


TASKS = (
    Task("boil", 30, 14, 21),
    Task("melt", 30, 14, 21),
    Task("freeze", 30, 14, 21),
    Task("change-the-state-of-matter-of", 30, 14, 21),
    Task("use-thermometer", 540, 270, 405),
    Task("measure-melting-point-known-substance", 436, 218, 327),
    Task("measure-melting-point-unknown-substance", 300, 150, 225),
    Task("power-component", 20, 10, 15),
    Task("power-component-renewable-vs-nonrenewable-energy", 20, 10, 15),
    Task("test-conductivity", 900, 450, 675),
    Task("test-conductivity-of-unknown-substances", 600, 300, 450),
    Task("find-living-thing", 300, 150, 225),
    Task("find-non-living-thing", 300, 150, 225),
    Task("find-plant", 300, 150, 225),
    Task("find-animal", 300, 150, 225),
    Task("chemistry-mix", 32, 16, 24),
    Task("chemistry-mix-paint-secondary-color", 36, 18, 27),
    Task("chemistry-mix-paint-tertiary-color", 36, 18, 27),
    Task("lifespan-longest-lived", 125, 62, 93),
    Task("lifespan-shortest-lived", 125, 62, 93),
    Task("lifespan-longest-lived-then-shortest-lived", 125, 62, 93),
    Task("identify-life-stages-1", 14, 6, 9),
    Task("identify-life-stages-2", 10, 4, 6),
)
ITEMS = sum(task.variations for task in TASKS)


def pair(item: int) -> tuple[Task, int]:
    """The task and variation of an item; GameError for an unknown item."""
    if 0 <= item < ITEMS:
        variation = item
        for task in TASKS:
            if variation < task.variations:
                return task, variation
            variation -= task.variations
    raise GameError(f"The data_idx {item} does not exist: sciworld has 0 to {ITEMS - 1}.")


def _split(test: bool) -> Sequence[int]:
    found: list[int] = []
    first = 0
    for task in TASKS:
        chosen = range(task.test_start, task.variations) if test else range(task.train_end)
        found += [first + variation for variation in chosen]
        first += task.variations
    return found


items = fixed_splits(train=_split(test=False), test=_split(test=True))
