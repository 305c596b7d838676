"""Tasks from files, and the order in which training meets them.

`read_tasks` turns OpenManus-RL's parquet, plain lists of item ids and supervised conversations into
the same `Task`s, and says in one line what is wrong with a file before anything is started.
`Mixture` deals tasks from several sources. The idea: the order is a pure function of the seed, the
source's name and the epoch, so a cursor of a few numbers resumes it anywhere, on any machine.
"""

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet

from manus_jax.data.chat import ConversationError, Message, message_from_record
from manus_jax.errors import UserError

CONVERSATION_COLUMNS = ("conversations", "messages")
KNOWN_COLUMNS = {"item_id", "id", "prompt", "data_source", "ground_truth", *CONVERSATION_COLUMNS}
ITEM_ID = re.compile(r"(?P<env>.+)_(?P<item>\d+)")
ENV_ALIASES = {
    "lmrlgym_maze": "maze",
    "lmrlgym_wordle": "wordle",
    "lmrlgum_maze": "maze",
    "lmrlgum_wordle": "wordle",
    "alworld": "alfworld",
}
"""Prefixes of item ids found in AgentGym's data → names of environments."""


class DatasetError(UserError, ValueError):
    """A file, row or cursor that cannot be used; the message says which and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One row: an item of an environment, a reference conversation, or both."""

    env: str | None
    item: int | None
    """The environment's own number for this task: the 31 of `textcraft_31`."""
    item_id: str
    prompt: tuple[Message, ...] = ()
    ground_truth: Any = None
    messages: tuple[Message, ...] = ()
    """The conversation to imitate; empty where there is none."""
    data_source: str = ""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read_tasks(
    paths: Paths,
    *,
    env: str | None = None,
    needs: Literal["item", "conversation"] = "item",
) -> list[Task]:
    """All rows of .parquet, .json and .jsonl files, in order.

    A row has an `item_id` ("textcraft_31", or a number, then of environment `env`, or else of the
    row's `data_source`), a conversation (`conversations` or `messages`, of from/value/loss or
    role/content), or both: `needs` says which one must be there. A JSON row may be a bare item id.
    `prompt` and `reward_model.ground_truth` are read too; other columns go to `Task.extra`.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not listed:
        raise DatasetError("no dataset files are given")
    with _collector_paused():
        return [task for path in listed for task in _read_file(Path(path), env, needs)]


def without(tasks: Iterable[Task], held_out: Iterable[Task]) -> list[Task]:
    """`tasks` less those of `held_out`: OpenManus-RL has its validation rows in its train files."""
    held = {_identity(task) for task in held_out}
    return [task for task in tasks if _identity(task) not in held]


class Mixture:
    """Deals tasks from weighted sources, each reshuffled every epoch, without end.

    The next task comes from the source that is furthest behind its share of all draws so far: exact
    proportions, no chance. Within a source, every row comes once per epoch; a batch that meets the
    end of an epoch runs on into the next.
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
        # Integers in the exact proportion of the weights: no rounding ever decides a draw.
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
        """The cursor, as JSON; it belongs to these tasks, weights and seed."""
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
        """Goes on where `state` was taken; anything but the same mixture is an error."""
        try:
            seed, saved = state["seed"], list(state["sources"])
            names = [cursor["name"] for cursor in saved]
            epochs = [int(cursor["epoch"]) for cursor in saved]
            positions = [int(cursor["position"]) for cursor in saved]
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(f"this is not a saved cursor of a mixture: {error!r}") from error
        if seed != self._seed:
            raise DatasetError(f"the cursor was saved with seed {seed}, this run has {self._seed}")
        if names != self._names:
            raise DatasetError(f"the cursor was saved for sources {names}, not {self._names}")
        for then, now in zip(saved, self.state()["sources"], strict=True):
            for key in ("rows", "weight", "fingerprint"):
                if then.get(key) != now[key]:
                    raise DatasetError(
                        f"source {now['name']!r} is not the one of the saved cursor: its {key} was "
                        f"{then.get(key)}, now it is {now[key]}; bring back the old dataset and "
                        "weights, or start a new run"
                    )
            if then["epoch"] < 0 or not 0 <= then["position"] < now["rows"]:
                raise DatasetError(f"the cursor of source {now['name']!r} is not on a row: {then}")
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
        # Sorting raw Philox bits: the same in every NumPy release, which permutation() is not.
        text = f"{self._seed}/{self._epochs[source]}/{self._names[source]}"
        key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], "<u8")
        bits = np.random.Philox(key=key).random_raw(len(self._tasks[source]))
        return np.argsort(bits, kind="stable")


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    # Millions of small objects that form no cycles: scanning them again and again doubles the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read_file(path: Path, env: str | None, needs: str) -> list[Task]:
    tasks = []
    for row, record in enumerate(_read_records(path, needs)):
        try:
            tasks.append(_task(record, env, needs, f"{path.stem}:{row}"))
        except DatasetError as error:
            raise DatasetError(f"{path} row {row}: {error}") from error
    if not tasks:
        raise DatasetError(f"{path} holds no rows")
    return tasks


def _read_records(path: Path, needs: str) -> Iterable[Any]:
    if not path.exists():
        raise DatasetError(f"no dataset file {path}")
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir())[:5]
        raise DatasetError(f"{path} is a directory; name a file in it (it holds {inside})")
    if path.stat().st_size == 0:
        raise DatasetError(f"{path} is empty (0 bytes)")
    match path.suffix:
        case ".parquet":
            return _read_parquet(path, needs)
        case ".json":
            return _read_json(path)
        case ".jsonl":
            return _read_jsonl(path)
    raise DatasetError(f"{path}: unknown kind of file; it must be .parquet, .json or .jsonl")


def _read_parquet(path: Path, needs: str) -> Iterator[Any]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := _missing_column(names, needs):
                raise DatasetError(f"{path}: {missing}")
            leaves = [file.schema.column(i).path for i in range(len(file.schema))]
            if "conversations" in names:  # OpenManus-RL repeats it, as JSON text, in extra_info
                leaves = [leaf for leaf in leaves if leaf != "extra_info.conversations"]
            for batch in file.iter_batches(4096, columns=leaves):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        first_line = str(error).splitlines()[0]
        raise DatasetError(f"{path} is not a readable parquet file: {first_line}") from error


def _read_json(path: Path) -> list[Any]:
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(
            f"{path} is not valid JSON: {error} (one object per line? then name it .jsonl)"
        ) from error
    if not isinstance(records, list):
        raise DatasetError(f"{path} must hold a list of rows, not a {type(records).__name__}")
    return records


def _read_jsonl(path: Path) -> Iterator[Any]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DatasetError(f"{path} line {number} is not valid JSON: {error}") from error


def _missing_column(columns: Iterable[str], needs: str) -> str | None:
    wanted = ("item_id",) if needs == "item" else CONVERSATION_COLUMNS
    if any(name in columns for name in wanted):
        return None
    return f"no column {' or '.join(map(repr, wanted))}; there are {list(columns)}"


def _task(record: Any, default_env: str | None, needs: str, fallback_id: str) -> Task:
    if isinstance(record, str | int) and not isinstance(record, bool):
        record = {"item_id": record}
    if not isinstance(record, dict):
        raise DatasetError(f"a row must be an object or an item id, got {type(record).__name__}")
    if missing := _missing_column(record, needs):
        raise DatasetError(missing)
    conversation = next(
        (record[key] for key in CONVERSATION_COLUMNS if record.get(key) is not None), None
    )
    if needs == "conversation" and not conversation:
        raise DatasetError("the conversation is empty")
    given = record.get("item_id")
    if given is None:
        given = record.get("id")
    source = record.get("data_source")
    if not isinstance(source, str | None):
        raise DatasetError(f"data_source must be text, got {source!r}")
    env, item = _env_and_item(given, default_env or source, needs)
    item_id = fallback_id if given is None else str(given)
    reward_model = record.get("reward_model")
    truth = record.get("ground_truth")
    if truth is None and isinstance(reward_model, dict):
        truth = reward_model.get("ground_truth")
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return Task(
        env=env,
        item=item,
        item_id=f"{env}_{item}" if item_id.isdecimal() and env else item_id,
        prompt=tuple(Message(m.role, m.content) for m in _messages(prompt, "prompt")),
        ground_truth=truth,
        messages=_messages(conversation, "the conversation"),
        data_source=source or env or "",
        extra={key: value for key, value in record.items() if key not in KNOWN_COLUMNS},
    )


def _env_and_item(given: Any, env: str | None, needs: str) -> tuple[str | None, int | None]:
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        if env is None and needs == "item":
            raise DatasetError(
                f"item_id {given} names no environment: write 'env_{given}' or give a default env"
            )
        return (env, given) if env else (None, None)
    found = ITEM_ID.fullmatch(given) if isinstance(given, str) else None
    if found:
        return ENV_ALIASES.get(found["env"], found["env"]), int(found["item"])
    if needs == "item":
        raise DatasetError(
            f"item_id {given!r} must be text like 'textcraft_31' or a number from 0 on"
        )
    return None, None


def _messages(records: Any, what: str) -> tuple[Message, ...]:
    if records is None:
        return ()
    if not isinstance(records, list):
        raise DatasetError(f"{what} must be a list of messages, got {type(records).__name__}")
    try:
        return tuple(map(message_from_record, records))
    except ConversationError as error:
        raise DatasetError(f"{what}: {error}") from error


def _identity(task: Task) -> tuple[str | None, int | str]:
    return (task.env, task.item) if task.item is not None else (None, task.item_id)


def _fingerprint(tasks: Iterable[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        said = [(m.role, m.content, m.train) for m in (*task.prompt, *task.messages)]
        parts = [task.env, task.item, task.item_id, task.ground_truth, len(task.prompt), said]
        digest.update(json.dumps(parts, default=str).encode("ascii"))
    return digest.hexdigest()[:32]
