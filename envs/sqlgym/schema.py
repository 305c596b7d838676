"""How a database is declared and how its rows are generated.

A column declares the kind of its values (name, category, number, date or reference), which is
enough both to fill it and to ask sensible questions about it.
"""

import math
import random
import sqlite3
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from typing import Literal

Value = str | int | float
Kind = Literal["label", "category", "number", "date", "ref"]


@dataclass(frozen=True)
class Column:
    """One column.

    `choices`: the words of a label or category; `low`, `high`: the bounds of a number or the years
    of a date; `decimals`: the decimal places of a number; `target`: the table of a ref.
    """

    name: str
    kind: Kind
    choices: tuple[str, ...] = ()
    low: int = 0
    high: int = 0
    decimals: int = 0
    target: str = ""

    @property
    def phrase(self) -> str:
        """The name as words."""
        return self.name.replace("_", " ")

    @property
    def sql_type(self) -> str:
        if self.kind == "number":
            return "REAL" if self.decimals else "INTEGER"
        return "INTEGER" if self.kind == "ref" else "TEXT"


@dataclass(frozen=True)
class Table:
    """One table with a key column `id` that starts at 1. `noun` is the word for one row."""

    name: str
    noun: str
    nouns: str
    rows: int
    columns: tuple[Column, ...]

    def of_kind(self, *kinds: Kind) -> list[Column]:
        return [column for column in self.columns if column.kind in kinds]

    @property
    def label(self) -> Column | None:
        """The column that names a row, if the table has one."""
        return next(iter(self.of_kind("label")), None)


@dataclass(frozen=True)
class Database:
    """A named list of tables; a table refers only to earlier tables."""

    name: str
    tables: tuple[Table, ...]

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)

    def describe(self) -> str:
        """The schema in one paragraph, the start of the observation."""
        names = ", ".join(table.name for table in self.tables)
        sentences = [f"{self.name} contains tables such as {names}."]
        for table in self.tables:
            columns = ", ".join(["id", *(column.name for column in table.columns)])
            sentences.append(f"Table {table.name} has columns such as {columns}.")
            sentences.append("id is the primary key.")
        for table in self.tables:
            for column in table.of_kind("ref"):
                sentences.append(
                    f"The {column.name} of {table.name} is the foreign key of id of"
                    f" {column.target}."
                )
        return " ".join(sentences)


def label(name: str, *parts: tuple[str, ...]) -> Column:
    """Unique names, each combining one word of every part."""
    combinations = [""]
    for part in parts:
        combinations = [f"{start} {word}".strip() for start in combinations for word in part]
    return Column(name, "label", choices=tuple(combinations))


def category(name: str, *choices: str) -> Column:
    return Column(name, "category", choices=choices)


def number(name: str, low: int, high: int, decimals: int = 0) -> Column:
    return Column(name, "number", low=low, high=high, decimals=decimals)


def day(name: str, first_year: int, last_year: int) -> Column:
    return Column(name, "date", low=first_year, high=last_year)


def ref(name: str, target: str) -> Column:
    return Column(name, "ref", target=target)


@cache
def image(database: Database) -> bytes:
    """The whole database as an SQLite file; its rows are the same on every machine."""
    connection = sqlite3.connect(":memory:")
    try:
        for table in database.tables:
            columns = ", ".join(f"{column.name} {column.sql_type}" for column in table.columns)
            refs = "".join(
                f", FOREIGN KEY ({column.name}) REFERENCES {column.target} (id)"
                for column in table.of_kind("ref")
            )
            connection.execute(
                f"CREATE TABLE {table.name} (id INTEGER PRIMARY KEY, {columns}{refs})"
            )
            marks = ", ".join("?" * (len(table.columns) + 1))
            connection.executemany(
                f"INSERT INTO {table.name} VALUES ({marks})", _rows(database, table)
            )
        connection.commit()
        return connection.serialize()
    finally:
        connection.close()


def _rows(database: Database, table: Table) -> list[tuple[Value, ...]]:
    rng = random.Random(f"{database.name}.{table.name}")
    columns = [_values(column, table.rows, database, rng) for column in table.columns]
    return [(index + 1, *row) for index, row in enumerate(zip(*columns, strict=True))]


def _values(column: Column, count: int, database: Database, rng: random.Random) -> list[Value]:
    if column.kind == "label":
        return list(rng.sample(column.choices, count))
    if column.kind == "category":
        # Earlier choices are more frequent, so groups differ in size.
        return [column.choices[_skewed(len(column.choices), rng)] for _ in range(count)]
    if column.kind == "number":
        scale = 10**column.decimals
        drawn = [rng.randint(column.low * scale, column.high * scale) for _ in range(count)]
        return [value / scale for value in drawn] if column.decimals else list(drawn)
    if column.kind == "date":
        first = date(column.low, 1, 1)
        span = (date(column.high, 12, 31) - first).days
        return [(first + timedelta(rng.randint(0, span))).isoformat() for _ in range(count)]
    # A fifth of the targets is never referred to.
    targets = database.table(column.target).rows * 4 // 5
    return [1 + _skewed(targets, rng) for _ in range(count)]


def _skewed(count: int, rng: random.Random) -> int:
    """A random index below `count`; small ones are more frequent."""
    drawn = rng.random()
    # Unlike a power, the square root is exact on every machine.
    return int(count * drawn * math.sqrt(drawn))
