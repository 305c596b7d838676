"""Safe execution of untrusted SQL.

Every query runs on a private in-memory copy of the database, with an authorizer that allows only
reading and a budget of instructions, time, rows and bytes.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

MAX_INSTRUCTIONS = 3_000_000
MAX_SECONDS = 3.0
"""For slow individual instructions; a normal query takes a thousandth of it."""
MAX_ROWS = 10_000
MAX_BYTES = 1_000_000
_INSTRUCTIONS_PER_CHECK = 5_000
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
_READING = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_UNSAFE = ("load_extension", "fts3_tokenizer")

Row = tuple[Any, ...]


class QueryError(Exception):
    """The query failed or was interrupted; the message is shown to the agent."""


def run(image: bytes, sql: str) -> list[Row]:
    """The rows of one SELECT on the serialized database `image`."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(image)
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(_budget(), _INSTRUCTIONS_PER_CHECK)
        return _fetch(connection.execute(sql))
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        message = "the query takes too long" if str(error) == "interrupted" else str(error)
        raise QueryError(message) from None
    finally:
        connection.close()


def same_rows(left: Sequence[Row], right: Sequence[Row]) -> bool:
    """Whether two results contain the same set of rows. Floats are rounded to six decimals."""
    return {_comparable(row) for row in left} == {_comparable(row) for row in right}


def _fetch(cursor: sqlite3.Cursor) -> list[Row]:
    rows: list[Row] = []
    size = 0
    for row in cursor:
        rows.append(row)
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if len(rows) > MAX_ROWS:
            raise QueryError(f"the query returns more than {MAX_ROWS} rows")
        if size > MAX_BYTES:
            raise QueryError(f"the query returns more than {MAX_BYTES} bytes")
    return rows


def _comparable(row: Row) -> Row:
    return tuple(round(value, 6) if isinstance(value, float) else value for value in row)


def _authorize(action: int, _: str | None, second: str | None, *__: str | None) -> int:
    if action not in _READING or (action == sqlite3.SQLITE_FUNCTION and second in _UNSAFE):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _budget() -> Callable[[], int]:
    """A progress handler that interrupts the query when its budget is spent."""
    checks = 0
    deadline = time.monotonic() + MAX_SECONDS

    def spent() -> int:
        nonlocal checks
        checks += 1
        spent_all = checks * _INSTRUCTIONS_PER_CHECK > MAX_INSTRUCTIONS
        return int(spent_all or time.monotonic() > deadline)

    return spent
