"""The order in which training visits tasks, with a cursor that resumes it.

The order is a pure function of the seed, the source name and the epoch, so a cursor of a few
numbers is enough to resume at any point and on any machine.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from manus_jax.config.settings import DataSettings
from manus_jax.data.tasks import DatasetError, Task, without

Sources = list[tuple[str, list[Task], float]]
"""Names, tasks and weights."""


def file_sources(
    data: DataSettings, tasks: Iterable[Sequence[Task]], held_out: Sequence[Task]
) -> Sources:
    """One source for each training file, given their `tasks`, without those that are held out."""
    sources: Sources = []
    for index, (path, listed) in enumerate(zip(data.train_files, tasks, strict=True)):
        kept = without(listed, held_out)
        weight = data.train_weights[index] if data.train_weights else float(max(1, len(kept)))
        # Without the folder, because the order of the data must not depend on it.
        sources.append((f"{index}:{Path(path).name}", kept, weight))
    return sources


class _Source:
    """One source of a mixture and its cursor: `position` tasks of `epoch` have been drawn."""

    def __init__(self, name: str, tasks: Sequence[Task], weight: float, seed: int) -> None:
        if not tasks:
            raise DatasetError(f"source {name!r} has no tasks that are not held out for validation")
        if not (math.isfinite(weight) and weight > 0):
            raise DatasetError(f"source {name!r} has weight {weight}; it must be positive")
        self.name = name
        self.tasks = list(tasks)
        self.weight = float(weight)
        self._seed = seed
        self.move_to(0, 0)

    def move_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        # Sorted raw Philox bits are the same in every NumPy release; permutation() is not.
        text = f"{self._seed}/{epoch}/{self.name}"
        key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], "<u8")
        bits = np.random.Philox(key=key).random_raw(len(self.tasks))
        self._order = np.argsort(bits, kind="stable")

    def draw(self) -> int:
        """The row of the next task."""
        row = int(self._order[self.position])
        self.position += 1
        if self.position == len(self.tasks):
            self.move_to(self.epoch + 1, 0)
        return row

    @property
    def drawn(self) -> int:
        """Tasks drawn since the start."""
        return self.epoch * len(self.tasks) + self.position

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for task in self.tasks:
            messages = [(m.role, m.content, m.train) for m in (*task.prompt, *task.messages)]
            parts = [task.env, task.item, task.item_id, task.ground_truth, len(task.prompt)]
            digest.update(json.dumps([*parts, messages], default=str).encode("ascii"))
        return digest.hexdigest()[:32]

    def cursor(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "epoch": self.epoch,
            "position": self.position,
            "rows": len(self.tasks),
            "weight": self.weight,
            "fingerprint": self._fingerprint,
        }


class Mixture:
    """An endless stream of tasks from weighted sources, each reshuffled every epoch.

    The next task comes from the source that is furthest behind its share of all draws so far, so
    proportions are exact and deterministic. Every row of a source is drawn once per epoch; a batch
    may span epochs.

    With `stage_tasks`, that many tasks are first drawn from each source alone, in their order: a
    curriculum.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, Sequence[Task], float]],
        seed: int = 0,
        stage_tasks: int = 0,
    ):
        if not sources:
            raise DatasetError("a mixture needs at least one source")
        self._seed = seed
        self._stage_tasks = stage_tasks
        self._names = [name for name, _, _ in sources]
        if len(set(self._names)) < len(sources):
            raise DatasetError(f"source names must differ, got {self._names}")
        self._sources = [_Source(*source, seed) for source in sources]
        # Integers in the exact proportion of the weights, so that no draw depends on rounding.
        shares = [Fraction(source.weight) for source in self._sources]
        scale = math.lcm(*(share.denominator for share in shares))
        self._shares = [int(share * scale) for share in shares]

    def next_batch(self, size: int) -> list[Task]:
        if size < 1:
            raise DatasetError(f"batch size must be at least 1, got {size}")
        return [self.task(self.draw()) for _ in range(size)]

    def task(self, place: tuple[int, int]) -> Task:
        """The task at a place that `draw` returned."""
        source, row = place
        return self._sources[source].tasks[row]

    def state(self) -> dict[str, Any]:
        """The cursor as JSON; it is valid only for the same tasks, weights, seed and stages."""
        return {"seed": self._seed, "sources": [source.cursor() for source in self._sources]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved `state`; raises DatasetError if the mixture differs."""
        try:
            seed, saved = state["seed"], list(state["sources"])
            names = [cursor["name"] for cursor in saved]
            places = [(int(cursor["epoch"]), int(cursor["position"])) for cursor in saved]
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(f"not a saved mixture cursor: {error!r}") from error
        if seed != self._seed:
            raise DatasetError(f"the cursor was saved with seed {seed}, this run uses {self._seed}")
        if names != self._names:
            raise DatasetError(f"the cursor was saved for sources {names}, not {self._names}")
        for then, source, (epoch, position) in zip(saved, self._sources, places, strict=True):
            now = source.cursor()
            for key in ("rows", "weight", "fingerprint"):
                if then.get(key) != now[key]:
                    raise DatasetError(
                        f"source {source.name!r} differs from the saved cursor: {key} was "
                        f"{then.get(key)} and is now {now[key]}; restore the old dataset and "
                        "weights, or start a new run"
                    )
            if epoch < 0 or not 0 <= position < len(source.tasks):
                raise DatasetError(f"the cursor of source {source.name!r} is out of range: {then}")
        for source, place in zip(self._sources, places, strict=True):
            source.move_to(*place)

    def draw(self) -> tuple[int, int]:
        """The place of the next task: its source and its row there."""
        counts = [source.drawn for source in self._sources]
        stage = sum(counts) // self._stage_tasks if self._stage_tasks else len(counts)
        if stage < len(counts):
            return stage, self._sources[stage].draw()
        counts = [count - self._stage_tasks for count in counts]
        draws, total = sum(counts) + 1, sum(self._shares)
        behind = [
            share * draws - total * count for share, count in zip(self._shares, counts, strict=True)
        ]
        source = behind.index(max(behind))
        return source, self._sources[source].draw()
