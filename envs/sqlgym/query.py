"""Safe execution of untrusted SQL.

A query runs on a private in-memory copy of the database, with an authorizer that allows only
reading, and limits on instructions, rows and bytes. A single call of an SQL function can exceed all
of them, so the queries of agents run in worker processes (this file, run as a script) that have a
memory limit and are killed by a timer.
"""

import os
import pickle
import queue
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

MAX_INSTRUCTIONS = 3_000_000
MAX_SECONDS = 3.0
"""For slow individual instructions; a normal query takes a thousandth of it."""
MAX_MEMORY = 256 * 1024 * 1024
"""Address space of a worker in bytes, of which Python itself takes about 30 MB."""
MAX_ROWS = 10_000
MAX_BYTES = 1_000_000
MAX_WORKERS = min(4, os.cpu_count() or 1)
TOO_LONG = "the query takes too long"
_INSTRUCTIONS_PER_CHECK = 5_000
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
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


class WorkerError(Exception):
    """A worker could not be started or ended for a reason other than its time limit."""


_workers: "queue.LifoQueue[subprocess.Popen[bytes] | None]" = queue.LifoQueue()
"""The idle workers; None is a worker that has yet to be started."""
for _ in range(MAX_WORKERS):
    _workers.put(None)


def run_untrusted(image: bytes, sql: str) -> list[Row]:
    """Like `run`, in a worker process. Waits for a free worker."""
    worker = _workers.get()
    try:
        if worker is None or worker.poll() is not None:
            command = [sys.executable, "-I", __file__]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert worker.stdin is not None and worker.stdout is not None
        pickle.dump((image, sql, MAX_SECONDS), worker.stdin)
        worker.stdin.flush()
        rows, problem = pickle.load(worker.stdout)
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        if worker is None:
            raise WorkerError(f"the SQL worker cannot be started: {error}") from None
        worker.kill()  # without effect on a worker that has ended
        worker.communicate()
        code, worker = worker.returncode, None
        if code == -signal.SIGALRM:
            raise QueryError(TOO_LONG) from None
        raise WorkerError(f"the SQL worker ended with exit code {code}") from None
    finally:
        _workers.put(worker)
    if problem:
        raise QueryError(problem)
    return rows


def run(image: bytes, sql: str) -> list[Row]:
    """The rows of one SELECT on the serialized database `image`."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(image)
        connection.execute("PRAGMA temp_store = MEMORY")  # no files, and counted as memory
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(_instruction_counter(), _INSTRUCTIONS_PER_CHECK)
        return _fetch(connection.execute(sql))
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        message = TOO_LONG if str(error) == "interrupted" else str(error)
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
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
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


def _instruction_counter() -> Callable[[], int]:
    """A progress handler that interrupts the query after MAX_INSTRUCTIONS."""
    checks = 0

    def spent() -> int:
        nonlocal checks
        checks += 1
        return int(checks * _INSTRUCTIONS_PER_CHECK > MAX_INSTRUCTIONS)

    return spent


def _work() -> None:
    """Answers queries from stdin on stdout. The timer ends the process, even inside SQLite."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server, which closes stdin
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            image, sql, seconds = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer = run(image, sql), ""
        except QueryError as error:
            answer = [], str(error)
        except MemoryError:
            answer = [], "the query needs too much memory"
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    _work()
