"""Tasks, read from files.

`read_tasks` converts OpenManus-RL's parquet files, plain lists of item ids and supervised
conversations to the same `Task` type. An unusable file or row raises a one-line error before
anything is started.
"""

import dataclasses
import gc
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet

from manus_jax.data.chat import ConversationError, Message, message_from_record
from manus_jax.errors import UserError

CONVERSATION_COLUMNS = ("conversations", "messages")
KNOWN_COLUMNS = {"item_id", "id", "prompt", "data_source", "ground_truth", *CONVERSATION_COLUMNS}
ITEM_ID = re.compile(r"(?:(?P<env>.+)_)?(?P<item>[0-9]{1,18})")
ENV_ALIASES = {
    "lmrlgym_maze": "maze",
    "lmrlgym_wordle": "wordle",
    "lmrlgum_maze": "maze",
    "lmrlgum_wordle": "wordle",
    "alworld": "alfworld",
}
"""Maps item id prefixes found in AgentGym's data to environment names."""


class DatasetError(UserError, ValueError):
    """A file, row or cursor is unusable; the message says which one and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One row of a dataset: an environment item, a reference conversation, or both."""

    env: str | None
    item: int | None
    """The environment's index of this task: 31 in `textcraft_31`."""
    item_id: str
    prompt: tuple[Message, ...] = ()
    ground_truth: Any = None
    messages: tuple[Message, ...] = ()
    """The conversation to imitate; empty if there is none."""
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of the tools in the conversation, in OpenAI's form."""
    data_source: str = ""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read_tasks(paths: Paths, *, needs: Literal["item", "conversation"] = "item") -> list[Task]:
    """Reads all rows of .parquet, .json and .jsonl files, in order.

    A row has an `item_id`, a conversation, or both; `needs` says which one is required. An item id
    is either text ("textcraft_31") or a number, which belongs to the environment `data_source`. A
    conversation is a list of messages with from/value/loss or role/content keys in the column
    `conversations` or `messages`, and may have `tools`, as a list or as JSON text. A JSON row may
    be a bare item id. `prompt` and `reward_model.ground_truth` are also read; all other columns go
    to `Task.extra`.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not listed:
        raise DatasetError("no dataset files are given")
    # Reading creates millions of small objects without cycles; collecting them doubles the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        return [task for path in listed for task in _read_file(Path(path), needs)]
    finally:
        if was_on:
            gc.enable()


def without(tasks: Iterable[Task], held_out: Iterable[Task]) -> list[Task]:
    """`tasks` minus `held_out`: OpenManus-RL's train files contain its validation rows."""
    held = {_identity(task) for task in held_out}
    return [task for task in tasks if _identity(task) not in held]


def _identity(task: Task) -> tuple[str | None, int | str]:
    return (task.env, task.item) if task.item is not None else (None, task.item_id)


def _read_file(path: Path, needs: str) -> list[Task]:
    tasks = []
    try:
        for row, record in enumerate(_read_records(path, needs)):
            try:
                tasks.append(_task(record, needs, f"{path.stem}:{row}"))
            except DatasetError as error:
                raise DatasetError(f"{path} row {row}: {error}") from error
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error
    if not tasks:
        raise DatasetError(f"{path} contains no rows")
    return tasks


def _read_records(path: Path, needs: str) -> Iterable[Any]:
    if not path.exists():
        raise DatasetError(f"dataset file {path} does not exist")
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir())[:5]
        raise DatasetError(f"{path} is a directory; give a file in it, e.g. one of {inside}")
    if not path.is_file():
        raise DatasetError(f"{path} is a pipe or a device, not a file")
    if path.stat().st_size == 0:
        raise DatasetError(f"{path} is empty (0 bytes)")
    match path.suffix:
        case ".parquet":
            return _read_parquet(path, needs)
        case ".json":
            hint = " (a file with one object per line must be .jsonl)"
            records = _parse_json(path.read_bytes(), str(path), hint)
            if isinstance(records, list):
                return records
            found = type(records).__name__
            raise DatasetError(f"{path} must contain a list of rows, not a {found}")
        case ".jsonl":
            lines = enumerate(path.read_bytes().split(b"\n"), start=1)
            return (_parse_json(line, f"{path} line {n}") for n, line in lines if line.strip())
    raise DatasetError(f"{path}: unknown file type; it must be .parquet, .json or .jsonl")


def _parse_json(text: bytes, where: str, hint: str = "") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where} is not valid JSON: {error}{hint}") from error


def _read_parquet(path: Path, needs: str) -> Iterator[Any]:
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            _check_columns(names, needs, f"{path}: ")
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise DatasetError(f"{path} has two columns {twice!r}")
            leaves = [file.schema.column(i).path for i in range(len(file.schema))]
            if "conversations" in names:  # OpenManus-RL duplicates it as JSON text in extra_info
                leaves = [leaf for leaf in leaves if leaf != "extra_info.conversations"]
            for batch in file.iter_batches(4096, columns=leaves):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        first_line = (str(error) or repr(error)).splitlines()[0]
        raise DatasetError(f"{path} is not a readable parquet file: {first_line}") from error


def _check_columns(columns: Iterable[str], needs: str, where: str = "") -> None:
    required = ("item_id",) if needs == "item" else CONVERSATION_COLUMNS
    if not any(name in columns for name in required):
        names = " or ".join(map(repr, required))
        raise DatasetError(f"{where}no column {names}; the columns are {list(columns)}")


def _task(record: Any, needs: str, fallback_id: str) -> Task:
    if isinstance(record, str | int) and not isinstance(record, bool):
        record = {"item_id": record}
    if not isinstance(record, dict):
        raise DatasetError(f"a row must be an object or an item id, got {type(record).__name__}")
    _check_columns(record, needs)
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
    env, item = _env_and_item(given, source, needs)
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
        tools=_tools(record.get("tools")) if needs == "conversation" else (),
        data_source=source or env or "",
        extra={key: value for key, value in record.items() if key not in KNOWN_COLUMNS},
    )


def _env_and_item(given: Any, env: str | None, needs: str) -> tuple[str | None, int | None]:
    """Environment and index of an item id; (None, None) for an id that names neither."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        given = str(given)
    found = ITEM_ID.fullmatch(given) if isinstance(given, str) else None
    named = (found["env"] or env) if found else None
    if found and named:
        return ENV_ALIASES.get(named, named), int(found["item"])
    if needs != "item":
        return None, None
    if found:
        raise DatasetError(
            f"item_id {given} has no environment: write 'env_{given}' or add a column data_source"
        )
    raise DatasetError(f"item_id {given!r} must be text like 'textcraft_31' or a number >= 0")


def _tools(schemas: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(schemas, str):
        schemas = _parse_json(schemas.encode(), "the text of 'tools'")
    if schemas is None:
        return ()
    if not isinstance(schemas, list) or not all(isinstance(tool, dict) for tool in schemas):
        raise DatasetError("'tools' must be a list of JSON schemas in OpenAI's form")
    return tuple(schemas)


def _messages(records: Any, what: str) -> tuple[Message, ...]:
    if records is None:
        return ()
    if not isinstance(records, list):
        raise DatasetError(f"{what} must be a list of messages, got {type(records).__name__}")
    try:
        return tuple(map(message_from_record, records))
    except ConversationError as error:
        raise DatasetError(f"{what}: {error}") from error
