"""The items of sqlgym: a fixed list of questions, training ones first.

The one idea: the list is made by one seeded pass over databases and templates that keeps a question
only if its answer is not empty, not long, and does not hang on the order of equal rows; nothing is
stored, and the list is the same everywhere.
"""

import random
import re
from collections.abc import Sequence
from functools import cache

from envs.game import GameError
from envs.sqlgym.databases import DATABASES
from envs.sqlgym.query import QueryError, run
from envs.sqlgym.questions import TEMPLATES, Draw, NothingToAsk, Question
from envs.sqlgym.schema import Database, image

PER_DATABASE = 240
TEST_ITEMS = 200
MAX_ANSWER_ROWS = 30
_RANKED = re.compile(r"^SELECT .+? (FROM .+ ORDER BY (.+) (?:ASC|DESC) LIMIT )(\d+)$")


@cache
def questions() -> tuple[Question, ...]:
    """All questions, by item."""
    made = [question for database in DATABASES for question in _ask(database)]
    random.Random("sqlgym").shuffle(made)
    return tuple(made)


def question(item: int) -> Question:
    """The question of an item; GameError when there is none."""
    known = questions()
    if not 0 <= item < len(known):
        raise GameError(f"The item_id {item} does not exist: sqlgym has 0 to {len(known) - 1}.")
    return known[item]


def items(split: str) -> Sequence[int]:
    """The items of "train" or "test"."""
    count = len(DATABASES) * PER_DATABASE
    splits = {"train": range(count - TEST_ITEMS), "test": range(count - TEST_ITEMS, count)}
    if split not in splits:
        raise GameError(f"unknown split {split!r}; there are: {', '.join(splits)}")
    return splits[split]


def _ask(database: Database) -> list[Question]:
    """PER_DATABASE different questions, every template in its turn."""
    rng = random.Random(f"questions of {database.name}")
    draw = Draw(database, rng)
    made: dict[str, Question] = {}
    turn = 0
    while len(made) < PER_DATABASE:
        turn += 1
        try:
            text, sql = TEMPLATES[turn % len(TEMPLATES)](draw)
        except NothingToAsk:
            continue
        if sql not in made and _is_fair(database, sql):
            made[sql] = Question(database, text, sql)
    return list(made.values())


def _is_fair(database: Database, sql: str) -> bool:
    """Whether the answer is short, not empty, not NULL, and the only right one."""
    data = image(database)
    try:
        rows = run(data, sql)
    except QueryError as error:
        raise ValueError(f"a template made bad SQL for {database.name}: {sql}: {error}") from None
    if not 0 < len(rows) <= MAX_ANSWER_ROWS or any(None in row for row in rows):
        return False
    if rows == [(0,)]:
        return False
    ranked = _RANKED.match(sql)
    if ranked is None:
        return True
    # With equal values at the limit, the answer would depend on the order of equal rows.
    start, value, limit = ranked.groups()
    values = run(data, f"SELECT {value} {start}{int(limit) + 1}")
    return len(values) > int(limit) and values[-1] != values[-2]
