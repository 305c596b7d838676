"""The order in which training visits tasks, with a cursor that resumes it.

The order is a pure function of the seed, the source name and the epoch, so a cursor of a few
numbers is enough to resume at any point and on any machine.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from manus_jax.data.tasks import DatasetError, Task


class Mixture:
    """An endless stream of tasks from weighted sources, each reshuffled every epoch.

    The next task comes from the source that is furthest behind its share of all draws so far, so
    proportions are exact and deterministic. Every row of a source is drawn once per epoch; a batch
    may span epochs.
    """

    def __init__(self, sources: Sequence[tuple[str, Sequence[Task], float]], seed: int = 0):
        if not sources:
            raise DatasetError("a mixture needs at least one source")
        self._names = [name for name, _, _ in sources]
        self._tasks = [list(tasks) for _, tasks, _ in sources]
        self._weights = [float(weight) for _, _, weight in sources]
        self._seed = seed
        if len(set(self._names)) < len(self._names):
            raise DatasetError(f"source names must differ, got {self._names}")
        for name, tasks, weight in zip(self._names, self._tasks, self._weights, strict=True):
            if not tasks:
                raise DatasetError(f"source {name!r} has no tasks")
            if not (math.isfinite(weight) and weight > 0):
                raise DatasetError(f"source {name!r} has weight {weight}; it must be positive")
        # Integers in the exact proportion of the weights, so that no draw depends on rounding.
        shares = [Fraction(weight) for weight in self._weights]
        scale = math.lcm(*(share.denominator for share in shares))
        self._shares = [int(share * scale) for share in shares]
        self._epochs = [0] * len(sources)
        self._positions = [0] * len(sources)
        self._orders = [self._order(source) for source in range(len(sources))]
        self._fingerprints: list[str] | None = None

    @property
    def epochs(self) -> dict[str, int]:
        """Completed passes over each source."""
        return dict(zip(self._names, self._epochs, strict=True))

    def next_batch(self, size: int) -> list[Task]:
        if size < 1:
            raise DatasetError(f"batch size must be at least 1, got {size}")
        return [self._draw() for _ in range(size)]

    def state(self) -> dict[str, Any]:
        """The cursor as JSON; it is valid only for the same tasks, weights and seed."""
        if self._fingerprints is None:
            self._fingerprints = [_fingerprint(tasks) for tasks in self._tasks]
        return {
            "seed": self._seed,
            "sources": [
                {
                    "name": name,
                    "epoch": self._epochs[source],
                    "position": self._positions[source],
                    "rows": len(self._tasks[source]),
                    "weight": self._weights[source],
                    "fingerprint": self._fingerprints[source],
                }
                for source, name in enumerate(self._names)
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved `state`; raises DatasetError if the mixture differs."""
        try:
            seed, saved = state["seed"], list(state["sources"])
            names = [cursor["name"] for cursor in saved]
            epochs = [int(cursor["epoch"]) for cursor in saved]
            positions = [int(cursor["position"]) for cursor in saved]
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(f"not a saved mixture cursor: {error!r}") from error
        if seed != self._seed:
            raise DatasetError(f"the cursor was saved with seed {seed}, this run uses {self._seed}")
        if names != self._names:
            raise DatasetError(f"the cursor was saved for sources {names}, not {self._names}")
        for then, now in zip(saved, self.state()["sources"], strict=True):
            for key in ("rows", "weight", "fingerprint"):
                if then.get(key) != now[key]:
                    raise DatasetError(
                        f"source {now['name']!r} differs from the saved cursor: {key} was "
                        f"{then.get(key)} and is now {now[key]}; restore the old dataset and "
                        "weights, or start a new run"
                    )
            if then["epoch"] < 0 or not 0 <= then["position"] < now["rows"]:
                raise DatasetError(f"the cursor of source {now['name']!r} is out of range: {then}")
        self._epochs, self._positions = epochs, positions
        self._orders = [self._order(source) for source in range(len(self._names))]

    def _draw(self) -> Task:
        counts = [
            epoch * len(tasks) + position
            for epoch, tasks, position in zip(
                self._epochs, self._tasks, self._positions, strict=True
            )
        ]
        draws, total = sum(counts) + 1, sum(self._shares)
        behind = [
            share * draws - total * count for share, count in zip(self._shares, counts, strict=True)
        ]
        source = behind.index(max(behind))
        task = self._tasks[source][self._orders[source][self._positions[source]]]
        self._positions[source] += 1
        if self._positions[source] == len(self._tasks[source]):
            self._epochs[source] += 1
            self._positions[source] = 0
            self._orders[source] = self._order(source)
        return task

    def _order(self, source: int) -> np.ndarray:
        # Sorted raw Philox bits are the same in every NumPy release; permutation() is not.
        text = f"{self._seed}/{self._epochs[source]}/{self._names[source]}"
        key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], "<u8")
        bits = np.random.Philox(key=key).random_raw(len(self._tasks[source]))
        return np.argsort(bits, kind="stable")


def _fingerprint(tasks: Iterable[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        messages = [(m.role, m.content, m.train) for m in (*task.prompt, *task.messages)]
        parts = [task.env, task.item, task.item_id, task.ground_truth, len(task.prompt), messages]
        digest.update(json.dumps(parts, default=str).encode("ascii"))
    return digest.hexdigest()[:32]
