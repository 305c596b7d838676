"""Questions with their SQL, generated from templates for any declared database.

A template draws tables, columns and values and phrases the question both in English and in SQL.
Values come from the data, so answers are rarely empty; `envs.sqlgym.tasks` rejects questions whose
answer is empty, too long or ambiguous.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from envs.sqlgym.query import run
from envs.sqlgym.schema import Column, Database, Table, Value, image

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """One item: `sql` is the reference answer to `text` on `database`."""

    database: Database
    text: str
    sql: str


@dataclass(frozen=True)
class Link:
    """A reference from a row of `child` to a row of `parent`."""

    child: Table
    column: Column
    parent: Table

    @property
    def on(self) -> str:
        return f"{self.child.name}.{self.column.name} = {self.parent.name}.id"

    @property
    def joined(self) -> str:
        return f"{self.parent.name} JOIN {self.child.name} ON {self.on}"


class NothingToAsk(Exception):
    """The database lacks the tables or columns that a template needs."""


class Draw:
    """The random choices of one template: tables, columns and values of one database."""

    def __init__(self, database: Database, rng: random.Random) -> None:
        self.database = database
        self.rng = rng

    def one_of(self, options: Sequence[T]) -> T:
        if not options:
            raise NothingToAsk
        return self.rng.choice(options)

    def table(self, needs: Callable[[Table], object] = lambda _: True) -> Table:
        return self.one_of([table for table in self.database.tables if needs(table)])

    def named_table(self) -> Table:
        return self.table(lambda table: table.label)

    def link(self, needs: Callable[[Link], object] = lambda _: True) -> Link:
        links = [
            Link(child, column, self.database.table(column.target))
            for child in self.database.tables
            for column in child.of_kind("ref")
        ]
        return self.one_of([link for link in links if needs(link)])

    def number(self, table: Table) -> Column:
        return self.one_of(table.of_kind("number"))

    def category(self, table: Table) -> Column:
        return self.one_of(table.of_kind("category"))

    def value(self, table: Table, column: Column) -> Value:
        return self.rng.choice(_values(self.database, table, column))

    def conditions(self, table: Table) -> tuple[tuple[str, str], tuple[str, str]]:
        """Two conditions on different columns."""
        columns = table.of_kind("category", "number", "date")
        if len(columns) < 2:
            raise NothingToAsk
        first, second = self.rng.sample(columns, 2)
        return self._condition(table, first), self._condition(table, second)

    def condition(self, table: Table, besides: Column | None = None) -> tuple[str, str]:
        """(words, SQL) of a condition on a row of `table`, excluding the column `besides`."""
        columns = table.of_kind("category", "number", "date")
        return self._condition(table, self.one_of([c for c in columns if c != besides]))

    def _condition(self, table: Table, column: Column) -> tuple[str, str]:
        value = self.value(table, column)
        where = f"{table.name}.{column.name}"
        if column.kind == "category":
            return f"whose {column.phrase} is {value}", f"{where} = '{value}'"
        if column.kind == "date":
            if self.rng.random() < 0.5:
                return f"whose {column.phrase} is after {value}", f"{where} > '{value}'"
            return f"whose {column.phrase} is before {value}", f"{where} < '{value}'"
        if self.rng.random() < 0.5:
            return f"whose {column.phrase} is greater than {value}", f"{where} > {value}"
        return f"whose {column.phrase} is less than {value}", f"{where} < {value}"

    def aggregate(self) -> tuple[str, str]:
        return self.rng.choice(
            [("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM")]
        )


def count_all(draw: Draw) -> tuple[str, str]:
    table = draw.table()
    return f"How many {table.nouns} are there?", f"SELECT COUNT(*) FROM {table.name}"


def count_where(draw: Draw) -> tuple[str, str]:
    table = draw.table()
    words, where = draw.condition(table)
    return (
        f"How many {table.nouns} are there {words}?",
        f"SELECT COUNT(*) FROM {table.name} WHERE {where}",
    )


def count_distinct(draw: Draw) -> tuple[str, str]:
    table = draw.table(lambda table: table.of_kind("category"))
    column = draw.category(table)
    return (
        f"How many different values of {column.phrase} do the {table.nouns} have?",
        f"SELECT COUNT(DISTINCT {column.name}) FROM {table.name}",
    )


def list_where(draw: Draw) -> tuple[str, str]:
    table = draw.named_table()
    name = _label(table)
    words, where = draw.condition(table)
    return (
        f"List the {name.phrase} of every {table.noun} {words}.",
        f"SELECT {name.name} FROM {table.name} WHERE {where}",
    )


def list_two_conditions(draw: Draw) -> tuple[str, str]:
    table = draw.named_table()
    name = _label(table)
    (first, where), (second, also) = draw.conditions(table)
    return (
        f"List the {name.phrase} of every {table.noun} {first} and {second}.",
        f"SELECT {name.name} FROM {table.name} WHERE {where} AND {also}",
    )


def list_two_columns(draw: Draw) -> tuple[str, str]:
    table = draw.named_table()
    name, number = _label(table), draw.number(table)
    words, where = draw.condition(table, besides=number)
    return (
        f"Show the {name.phrase} and the {number.phrase} of every {table.noun} {words}.",
        f"SELECT {name.name}, {number.name} FROM {table.name} WHERE {where}",
    )


def aggregate_where(draw: Draw) -> tuple[str, str]:
    table = draw.table(lambda table: table.of_kind("number"))
    column = draw.number(table)
    words, where = draw.condition(table, besides=column)
    kind, function = draw.aggregate()
    return (
        f"What is the {kind} {column.phrase} of all {table.nouns} {words}?",
        f"SELECT {function}({column.name}) FROM {table.name} WHERE {where}",
    )


def extreme_row(draw: Draw) -> tuple[str, str]:
    table = draw.named_table()
    name, column = _label(table), draw.number(table)
    kind, order = draw.rng.choice([("highest", "DESC"), ("lowest", "ASC")])
    return (
        f"What is the {name.phrase} of the {table.noun} with the {kind} {column.phrase}?",
        f"SELECT {name.name} FROM {table.name} ORDER BY {column.name} {order} LIMIT 1",
    )


def top_rows(draw: Draw) -> tuple[str, str]:
    table = draw.named_table()
    name, column = _label(table), draw.number(table)
    kind, order = draw.rng.choice([("highest", "DESC"), ("lowest", "ASC")])
    count, word = draw.rng.choice([(2, "two"), (3, "three"), (5, "five")])
    return (
        f"List the {name.phrase} of the {word} {table.nouns} with the {kind} {column.phrase}.",
        f"SELECT {name.name} FROM {table.name} ORDER BY {column.name} {order} LIMIT {count}",
    )


def group_count(draw: Draw) -> tuple[str, str]:
    table = draw.table(lambda table: table.of_kind("category"))
    column = draw.category(table)
    return (
        f"For each {column.phrase}, show the {column.phrase} and the number of {table.nouns}.",
        f"SELECT {column.name}, COUNT(*) FROM {table.name} GROUP BY {column.name}",
    )


def group_aggregate(draw: Draw) -> tuple[str, str]:
    table = draw.table(lambda table: table.of_kind("category") and table.of_kind("number"))
    column, number = draw.category(table), draw.number(table)
    kind, function = draw.aggregate()
    return (
        f"For each {column.phrase} of the {table.nouns}, show the {column.phrase} and the {kind}"
        f" {number.phrase}.",
        f"SELECT {column.name}, {function}({number.name}) FROM {table.name} GROUP BY {column.name}",
    )


def group_having(draw: Draw) -> tuple[str, str]:
    table = draw.table(lambda table: table.of_kind("category"))
    column = draw.category(table)
    count = draw.rng.randint(2, max(3, table.rows // len(column.choices)))
    return (
        f"Which values of {column.phrase} occur in more than {count} {table.nouns}?",
        f"SELECT {column.name} FROM {table.name} GROUP BY {column.name} HAVING COUNT(*) > {count}",
    )


def above_average(draw: Draw) -> tuple[str, str]:
    table = draw.named_table()
    name, column = _label(table), draw.number(table)
    word, operator = draw.rng.choice([("above", ">"), ("below", "<")])
    return (
        f"List the {name.phrase} of every {table.noun} whose {column.phrase} is {word} the average"
        f" {column.phrase} of all {table.nouns}.",
        f"SELECT {name.name} FROM {table.name} WHERE {column.name} {operator}"
        f" (SELECT AVG({column.name}) FROM {table.name})",
    )


def children_of_parent(draw: Draw) -> tuple[str, str]:
    link = draw.link(lambda link: link.child.of_kind("number"))
    words, where = draw.condition(link.parent)
    column = draw.number(link.child)
    kind, function = draw.aggregate()
    return (
        f"What is the {kind} {column.phrase} of the {link.child.nouns} that belong to"
        f" {link.parent.nouns} {words}?",
        f"SELECT {function}({link.child.name}.{column.name}) FROM {link.joined} WHERE {where}",
    )


def count_children(draw: Draw) -> tuple[str, str]:
    link = draw.link()
    (first, where), (second, also) = draw.condition(link.parent), draw.condition(link.child)
    return (
        f"How many {link.child.nouns} {second} belong to {link.parent.nouns} {first}?",
        f"SELECT COUNT(*) FROM {link.joined} WHERE {where} AND {also}",
    )


def parents_with_child(draw: Draw) -> tuple[str, str]:
    link = draw.link(lambda link: link.parent.label)
    name = _label(link.parent)
    words, where = draw.condition(link.child)
    return (
        f"List the {name.phrase} of every {link.parent.noun} that has at least one"
        f" {link.child.noun} {words}.",
        f"SELECT DISTINCT {link.parent.name}.{name.name} FROM {link.joined} WHERE {where}",
    )


def parents_by_count(draw: Draw) -> tuple[str, str]:
    link = draw.link(lambda link: link.parent.label)
    name = _label(link.parent)
    count = draw.rng.randint(1, max(2, 2 * link.child.rows // link.parent.rows))
    return (
        f"List the {name.phrase} of every {link.parent.noun} with more than {count}"
        f" {link.child.nouns}.",
        f"SELECT {link.parent.name}.{name.name} FROM {link.joined}"
        f" GROUP BY {link.parent.name}.id HAVING COUNT(*) > {count}",
    )


def count_per_parent(draw: Draw) -> tuple[str, str]:
    link = draw.link(lambda link: link.parent.label)
    name = _label(link.parent)
    words, where = draw.condition(link.parent)
    return (
        f"For every {link.parent.noun} {words} that has any {link.child.nouns}, show the"
        f" {name.phrase} and the number of {link.child.nouns}.",
        f"SELECT {link.parent.name}.{name.name}, COUNT(*) FROM {link.joined} WHERE {where}"
        f" GROUP BY {link.parent.name}.id",
    )


def aggregate_per_parent(draw: Draw) -> tuple[str, str]:
    link = draw.link(lambda link: link.parent.label and link.child.of_kind("number"))
    name, column = _label(link.parent), draw.number(link.child)
    words, where = draw.condition(link.parent)
    kind, function = draw.aggregate()
    return (
        f"For every {link.parent.noun} {words} that has any {link.child.nouns}, show the"
        f" {name.phrase} and the {kind} {column.phrase} of its {link.child.nouns}.",
        f"SELECT {link.parent.name}.{name.name}, {function}({link.child.name}.{column.name})"
        f" FROM {link.joined} WHERE {where} GROUP BY {link.parent.name}.id",
    )


def busiest_parent(draw: Draw) -> tuple[str, str]:
    link = draw.link(lambda link: link.parent.label)
    name = _label(link.parent)
    return (
        f"What is the {name.phrase} of the {link.parent.noun} with the most {link.child.nouns}?",
        f"SELECT {link.parent.name}.{name.name} FROM {link.joined}"
        f" GROUP BY {link.parent.name}.id ORDER BY COUNT(*) DESC LIMIT 1",
    )


def parents_without(draw: Draw) -> tuple[str, str]:
    link = draw.link(lambda link: link.parent.label)
    name = _label(link.parent)
    return (
        f"List the {name.phrase} of every {link.parent.noun} that has no {link.child.nouns}.",
        f"SELECT {name.name} FROM {link.parent.name} WHERE id NOT IN"
        f" (SELECT {link.column.name} FROM {link.child.name})",
    )


def parents_without_such(draw: Draw) -> tuple[str, str]:
    link = draw.link(lambda link: link.parent.label)
    name = _label(link.parent)
    words, where = draw.condition(link.child)
    return (
        f"List the {name.phrase} of every {link.parent.noun} that has no {link.child.noun}"
        f" {words}.",
        f"SELECT {name.name} FROM {link.parent.name} WHERE id NOT IN"
        f" (SELECT {link.column.name} FROM {link.child.name} WHERE {where})",
    )


def grandchildren(draw: Draw) -> tuple[str, str]:
    lower = draw.link(lambda link: link.parent.of_kind("ref"))
    middle = lower.parent
    column = draw.rng.choice(middle.of_kind("ref"))
    upper = Link(middle, column, draw.database.table(column.target))
    words, where = draw.condition(upper.parent)
    return (
        f"How many {lower.child.nouns} belong to {middle.nouns} that belong to"
        f" {upper.parent.nouns} {words}?",
        f"SELECT COUNT(*) FROM {upper.joined} JOIN {lower.child.name} ON {lower.on} WHERE {where}",
    )


def parents_with_both(draw: Draw) -> tuple[str, str]:
    link = draw.link(lambda link: link.parent.label and link.child.of_kind("category"))
    name, column = _label(link.parent), draw.category(link.child)
    one, other = draw.rng.sample(column.choices, 2)
    select = f"SELECT {link.parent.name}.{name.name} FROM {link.joined} WHERE"
    where = f"{link.child.name}.{column.name}"
    return (
        f"List the {name.phrase} of every {link.parent.noun} that has both {link.child.nouns} with"
        f" {column.phrase} {one} and {link.child.nouns} with {column.phrase} {other}.",
        f"{select} {where} = '{one}' INTERSECT {select} {where} = '{other}'",
    )


TEMPLATES: tuple[Callable[[Draw], tuple[str, str]], ...] = (
    count_all,
    count_where,
    count_distinct,
    list_where,
    list_two_conditions,
    list_two_columns,
    aggregate_where,
    extreme_row,
    top_rows,
    group_count,
    group_aggregate,
    group_having,
    above_average,
    children_of_parent,
    count_children,
    parents_with_child,
    parents_by_count,
    count_per_parent,
    aggregate_per_parent,
    busiest_parent,
    parents_without,
    parents_without_such,
    grandchildren,
    parents_with_both,
)


@cache
def _values(database: Database, table: Table, column: Column) -> tuple[Value, ...]:
    """The values of one column, in row order."""
    rows = run(image(database), f"SELECT {column.name} FROM {table.name} ORDER BY id")
    return tuple(row[0] for row in rows)


def _label(table: Table) -> Column:
    if table.label is None:
        raise ValueError(f"table {table.name} has no column that names its rows")
    return table.label
