"""sqlgym: correct reference queries, judgement by rows, and safety against any SQL."""

import json
import queue
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from env_servers import Client
from fingerprints import fingerprint, fingerprint_elsewhere

from envs.game import GameError
from envs.sqlgym import SPEC, query
from envs.sqlgym.databases import DATABASES, SHOP
from envs.sqlgym.game import SqlGame
from envs.sqlgym.query import MAX_ROWS, QueryError, run, run_untrusted, same_rows
from envs.sqlgym.schema import Database, Table, image, label, number
from envs.sqlgym.tasks import question, questions

TRANSCRIPT = Path(__file__).parents[1] / "support" / "transcripts" / "sqlgym.jsonl"


def item_asking(text: str) -> int:
    return next(n for n, asked in enumerate(questions()) if asked.text == text)


def answer(item: int, sql: str) -> tuple[str, float]:
    game = SqlGame()
    game.reset(item)
    step = game.step(sql)
    assert step.done and step.info["ground_truth"] == question(item).sql
    return step.observation, step.reward


def test_the_observation_describes_the_schema_and_asks() -> None:
    text = SqlGame().reset(item_asking("How many products are there?"))
    schema, _, asked = text.partition("\n\n")
    assert asked == "How many products are there?"
    assert schema.startswith(
        "shop contains tables such as customer, product, purchase."
        " Table customer has columns such as id, name, city, age, joined. id is the primary key."
    )
    assert schema.endswith("The product_id of purchase is the foreign key of id of product.")


def test_any_query_with_the_right_rows_wins() -> None:
    item = item_asking("How many products are there?")
    assert answer(item, "SELECT COUNT(*) FROM product") == ("[(40,)]", 1.0)
    assert answer(item, "select sum(1.0) as n from product p;") == ("[(40.0,)]", 1.0)
    assert answer(item, "SELECT 41") == ("[(41,)]", 0.0)
    assert answer(item, "SELECT COUNT(*), 1 FROM product") == ("[(40, 1)]", 0.0)
    assert answer(item, "SELEC 1") == ('near "SELEC": syntax error', 0.0)
    assert answer(item, "") == ("[]", 0.0)


def test_the_state_is_cut_at_100_characters() -> None:
    state, reward = answer(0, "SELECT 1111111111 UNION SELECT 2 UNION " * 6 + "SELECT 3, 4")
    assert reward == 0 and len(state) <= 100
    state, _ = answer(0, f"SELECT '{'x' * 500}'")
    assert state == "[('" + "x" * 97


def test_rows_are_compared_as_a_set_with_numbers_to_six_decimals() -> None:
    assert same_rows([(1, "a"), (2, "b"), (1, "a")], [(2, "b"), (1, "a")])
    assert same_rows([(0.1 + 0.2,)], [(0.3,)]) and same_rows([(2.0,)], [(2,)])
    assert not same_rows([(1,)], [(1,), (2,)]) and not same_rows([("1",)], [(1,)])
    assert not same_rows([(None,)], []) and not same_rows([("a", "b")], [("b", "a")])


def test_reference_queries_agree_with_counting_by_hand() -> None:
    people = Table("t", "t", "t", 3, (label("name", ("a", "b", "c")), number("age", 1, 9)))
    data = image(Database("hand", (people,)))
    rows = run(data, "SELECT name, age FROM t")
    assert sorted(name for name, _ in rows) == ["a", "b", "c"]
    ages = [age for _, age in rows]
    assert run(data, "SELECT SUM(age), MAX(age) FROM t") == [(sum(ages), max(ages))]


def test_there_are_hundreds_of_different_questions_with_answers() -> None:
    asked = questions()
    assert len(asked) == 1200 == len({q.sql for q in asked}) == len({q.text for q in asked})
    for needed in ("JOIN", "GROUP BY", "HAVING", "INTERSECT", "NOT IN", "(SELECT AVG", "LIMIT"):
        assert sum(needed in q.sql for q in asked) >= 20
    assert {q.database for q in asked} == set(DATABASES)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_oracle_wins(split: str) -> None:
    game = SqlGame()
    for item in SPEC.items(split)[::5]:
        assert SPEC.oracle is not None
        step = game.step(SPEC.oracle(item)(game.reset(item)).action)
        assert step.done and step.reward == 1


def test_splits_are_disjoint_in_items_and_in_queries() -> None:
    train, test = SPEC.items("train"), SPEC.items("test")
    assert (len(train), len(test)) == (1000, 200) and not set(train) & set(test)
    assert not {question(n).sql for n in train} & {question(n).sql for n in test}
    with pytest.raises(GameError, match="unknown split"):
        SPEC.items("dev")


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE customer",
        "INSERT INTO customer VALUES (1, 2, 3, 4, 5)",
        "UPDATE product SET price = 0",
        "CREATE TABLE x (y)",
        "ATTACH 'stolen.db' AS y",
        "PRAGMA writable_schema = 1",
        "SELECT * FROM pragma_database_list",
        "VACUUM INTO 'stolen.db'",
        "BEGIN",
        "SELECT load_extension('x')",
        "SELECT fts3_tokenizer('simple')",
        "SELECT 1; DROP TABLE customer",
        "SELECT * FROM purchase a, purchase b, purchase c",
        "SELECT COUNT(*) FROM purchase a, purchase b, purchase c, purchase d",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT SUM(x) FROM c",
        "WITH RECURSIVE c(x) AS (SELECT 'x' UNION ALL SELECT hex(zeroblob(9000)) FROM c)"
        " SELECT * FROM c",
        "SELECT zeroblob(2000000000)",
        "SELECT group_concat(a.name || b.name || p.title) FROM customer a, customer b, product p",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT 1 " + "UNION SELECT 1 " * 1000,
        "SELECT '\x00'",
        "SELECT CAST(x'ff' AS TEXT)",
        "SELECT '" + "x" * 1_000_000 + "'",
    ],
)
def test_hostile_sql_is_refused_in_words(
    sql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QueryError) as refusal:
        run_untrusted(image(SHOP), sql)
    assert 0 < len(str(refusal.value)) < 200
    assert not list(tmp_path.iterdir())
    assert run_untrusted(image(SHOP), "SELECT COUNT(*) FROM customer") == [(48,)]


MANY = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 200000) "


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT printf('%.*c', 1000000000, 'x')", "too long"),  # 19 s in one instruction
        ("SELECT sum(length(printf('%19999d', a.id))) FROM purchase a, purchase b", "too long"),
        (MANY + "SELECT y FROM (SELECT zeroblob(19000) || x AS y FROM c) ORDER BY y", "memory"),
        ("SELECT " + ", ".join(["1.5"] * 100) + " FROM purchase a, purchase b", "bytes"),
    ],
)
def test_no_query_exceeds_its_time_or_memory(
    sql: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_SECONDS", 0.3 if reason == "too long" else 20.0)
    began = time.monotonic()
    with pytest.raises(QueryError, match=reason):
        run_untrusted(image(SHOP), sql)
    if reason == "too long":
        assert time.monotonic() - began < 3
    assert run_untrusted(image(SHOP), "SELECT COUNT(*) FROM customer") == [(48,)]


def test_a_query_whose_worker_is_killed_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    idle: queue.LifoQueue[Any] = queue.LifoQueue()
    idle.put(None)
    monkeypatch.setattr(query, "_workers", idle)
    assert run_untrusted(image(SHOP), "SELECT 1") == [(1,)]
    worker = idle.get()
    idle.put(worker)
    game = SqlGame()
    game.reset(0)
    with ThreadPoolExecutor() as pool:
        step = pool.submit(game.step, "SELECT printf('%.*c', 1000000000, 'x')")
        time.sleep(0.1)
        worker.kill()
        with pytest.raises(GameError, match="not run: the SQL worker ended with exit code -9"):
            step.result()
    assert game.step("SELECT 1").done
    idle.get().communicate()


def test_a_result_at_the_row_limit_still_passes() -> None:
    data = image(SHOP)
    many = "SELECT 1 FROM purchase a, purchase b LIMIT"
    assert len(run(data, f"{many} {MAX_ROWS}")) == MAX_ROWS
    with pytest.raises(QueryError, match="rows"):
        run(data, f"{many} {MAX_ROWS + 1}")


def test_the_image_is_a_database_that_sqlite_finds_sound() -> None:
    for database in DATABASES:
        connection = sqlite3.connect(":memory:")
        connection.deserialize(image(database))
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.close()


@pytest.mark.slow
def test_items_are_the_same_in_another_process() -> None:
    items = list(range(0, 1200, 40))
    assert fingerprint("sqlgym", items) == fingerprint_elsewhere("sqlgym", items)


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return "number" if isinstance(value, int | float) and value not in (True,) else type(value)


def test_the_server_answers_in_the_recorded_shapes_and_never_reuses_a_live_id(
    served: Callable[[str], str],
) -> None:
    client = Client(served("sqlgym"))
    session, created = -1, []
    for line in TRANSCRIPT.read_text(encoding="utf-8").splitlines():
        exchange = json.loads(line)
        method, path, body = (exchange["request"][key] for key in ("method", "path", "body"))
        if path == "/close":
            continue  # the original has none, ours has
        if body is not None:
            body = {**body, "env_idx": session}
            if body.get("item_id") == 9428:
                body["item_id"] = 1000  # the first item of the second split
        path = path.split("=")[0] + f"={session}" if "=" in path else path
        status, answer = client.get(path) if method == "GET" else client.post(path, body)
        assert status == exchange["status"], exchange
        if path == "/create":
            created.append(answer)
            session = answer if session < 0 else session
        elif status == 200 and path != "/list_envs":
            expected = json.loads(exchange["response_text"])
            if path == "/step":
                assert set(answer) == {"state", "reward", "done", "info"} and answer["done"] is True
                assert set(answer["info"]) == {"ground_truth"}
            else:
                assert shape(answer) == shape(expected), exchange
    assert len(created) > 9 and len(set(created)) == len(created)


def test_an_episode_over_http_is_scored_and_then_over(served: Callable[[str], str]) -> None:
    client = Client(served("sqlgym"))
    session = client.ok("/create")
    observation, nothing = client.ok("/reset", {"env_idx": session, "item_id": 3})
    assert nothing is None and client.get(f"/observation?env_idx={session}") == (200, observation)
    step = client.ok("/step", {"env_idx": session, "action": question(3).sql})
    assert step["reward"] == 1.0 and step["info"] == {"ground_truth": question(3).sql}
    assert client.post("/step", {"env_idx": session, "action": "SELECT 1"})[0] == 500
    client.ok("/reset", {"env_idx": session, "item_id": 3})
    huge = client.ok("/step", {"env_idx": session, "action": "SELECT '" + "x" * 1_000_000})
    assert huge["reward"] == 0.0 and len(huge["state"]) <= 100
    assert client.post("/reset", {"env_idx": session, "item_id": 99999})[0] == 500
    assert client.ok("/close", {"env_idx": session}) is True
