import gc
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manus_jax.data.chat import Message
from manus_jax.data.tasks import DatasetError, Task, read_tasks, without

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "openmanus_rl"

MESSAGE = pa.struct([("from", pa.string()), ("loss", pa.bool_()), ("value", pa.string())])
PROMPT = pa.struct([("content", pa.string()), ("role", pa.string())])
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("item_id", pa.string()),
        ("conversations", pa.list_(MESSAGE)),
        ("prompt", pa.list_(PROMPT)),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [("conversations", pa.string()), ("index", pa.int64()), ("split", pa.string())]
            ),
        ),
    ]
)


def openmanus_row(number):
    said = [
        {"from": "human", "loss": None, "value": "Rules."},
        {"from": "gpt", "loss": False, "value": "OK."},
        {"from": "human", "loss": None, "value": f"Goal {number}"},
        {"from": "gpt", "loss": True, "value": "Action:\ninventory"},
    ]
    return {
        "data_source": "textcraft",
        "item_id": f"textcraft_{number}",
        "conversations": said,
        "prompt": [{"role": "user", "content": "You are an agent."}],
        "ability": "agent-reasoning",
        "reward_model": {"ground_truth": json.dumps(said), "style": "rule"},
        "extra_info": {"conversations": json.dumps(said), "index": number, "split": "textcraft"},
    }


def write_parquet(path, rows, schema=SCHEMA):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def write_json(path, rows):
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return path


# reading


@pytest.mark.bug("B1")
def test_openmanus_parquet_is_read_as_it_is(tmp_path):
    path = write_parquet(tmp_path / "train.parquet", [openmanus_row(31), openmanus_row(7)])
    first, second = read_tasks(path)
    assert first == Task(
        env="textcraft",
        item=31,
        item_id="textcraft_31",
        prompt=(Message("user", "You are an agent."),),
        ground_truth=json.dumps(openmanus_row(31)["conversations"]),
        messages=(
            Message("user", "Rules."),
            Message("assistant", "OK.", False),
            Message("user", "Goal 31"),
            Message("assistant", "Action:\ninventory", True),
        ),
        data_source="textcraft",
        extra={
            "ability": "agent-reasoning",
            "reward_model": openmanus_row(31)["reward_model"],
            "extra_info": {"index": 31, "split": "textcraft"},
        },
    )
    assert (second.env, second.item) == ("textcraft", 7)


@pytest.mark.parametrize(
    ("name", "env", "rows"),
    [
        ("babyai-train", "babyai", 810),
        ("babyai-val", "babyai", 20),
        ("textcraft-train", "textcraft", 374),
        ("textcraft-val", "textcraft", 20),
        ("weather-val", "weather", 20),
    ],
)
def test_the_real_files_are_read_whole(name, env, rows):
    path = REAL / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"OpenManus-RL's {path.name} is not here")
    tasks = read_tasks(path)
    table = pq.read_table(path)
    assert len(tasks) == rows == table.num_rows
    assert {task.env for task in tasks} == {env}
    assert [f"{task.env}_{task.item}" for task in tasks] == table["item_id"].to_pylist()
    for task, said in zip(tasks, table["conversations"].to_pylist(), strict=True):
        assert [m.content for m in task.messages] == [turn["value"] for turn in said]
        assert [m.train for m in task.messages] == [turn["loss"] is True for turn in said]
        assert task.messages[1].role == "assistant" and not task.messages[1].train
        assert json.loads(task.ground_truth) == [
            {key: turn[key] for key in ("from", "loss", "value")} for turn in said
        ]


@pytest.mark.parametrize("env", ["babyai", "textcraft"])
def test_validation_rows_can_be_held_out_of_the_real_train_file(env):
    if not REAL.exists():
        pytest.skip("OpenManus-RL's parquet files are not here")
    train, val = (read_tasks(REAL / f"{env}-{split}.parquet") for split in ("train", "val"))
    kept = without(train, val)
    assert len(kept) == len(train) - 20, "all 20 validation rows are in the train file"
    assert not {task.item for task in kept} & {task.item for task in val}


def test_several_files_follow_each_other(tmp_path):
    a = write_json(tmp_path / "a.json", ["webshop_6"])
    b = write_json(tmp_path / "b.json", [{"item_id": "maze_2"}])
    assert [(t.env, t.item) for t in read_tasks([a, str(b)])] == [("webshop", 6), ("maze", 2)]


def test_item_ids_in_json_jsonl_and_parquet(tmp_path):
    ids = ["sciworld_12", "lmrlgym_maze_3", "lmrlgum_wordle_1"]
    want = [("sciworld", 12), ("maze", 3), ("wordle", 1)]
    lines = tmp_path / "ids.jsonl"
    rows = [*({"item_id": i} for i in ids), {"item_id": "17", "data_source": "babyai"}]
    lines.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    numbers = tmp_path / "ids.parquet"
    pq.write_table(pa.table({"item_id": [4, 17], "data_source": ["babyai"] * 2}), numbers)
    bare = read_tasks(write_json(tmp_path / "ids.json", ids))
    assert [(t.env, t.item) for t in bare] == want
    assert [(t.env, t.item) for t in read_tasks(lines)] == [*want, ("babyai", 17)]
    assert [t.item_id for t in read_tasks(numbers)] == ["babyai_4", "babyai_17"]
    assert bare[0].messages == () and bare[0].prompt == () and bare[0].ground_truth is None


def test_numbers_take_the_environment_of_their_row(tmp_path):
    path = write_json(tmp_path / "x.json", [{"item_id": 6, "data_source": "webshop"}])
    (task,) = read_tasks(path)
    assert (task.env, task.item, task.item_id) == ("webshop", 6, "webshop_6")


def test_conversations_of_both_formats(tmp_path):
    rows = [
        {
            "id": "os_1",
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        },
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {
            "conversations": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a"},
            ]
        },
    ]
    tasks = read_tasks(write_json(tmp_path / "sft.json", rows), needs="conversation")
    want = (Message("user", "q"), Message("assistant", "a", True))
    assert [task.messages for task in tasks] == [want] * 3
    assert [task.item_id for task in tasks] == ["os_1", "sft:1", "sft:2"]
    assert [task.env for task in tasks] == ["os", None, None]


def test_jsonl_lines_end_with_newlines_alone(tmp_path):
    path = tmp_path / "x.jsonl"
    row = {"item_id": "maze_1", "prompt": "one\u2028two\x85three"}
    path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert read_tasks(path)[0].prompt == (Message("user", "one\u2028two\x85three"),)


def test_reading_leaves_the_garbage_collector_as_it_was(tmp_path):
    assert gc.isenabled()
    with pytest.raises(DatasetError):
        read_tasks(write_json(tmp_path / "x.json", [{}]))
    assert gc.isenabled()


# errors


def message_of(error):
    text = str(error.value)
    assert "\n" not in text, "one line"
    return text


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), path)
    with pytest.raises(DatasetError) as error:
        read_tasks(path)
    assert (
        message_of(error) == f"{path}: no column 'item_id'; the columns are ['question', 'answer']"
    )
    with pytest.raises(DatasetError) as error:
        read_tasks(path, needs="conversation")
    assert "no column 'conversations' or 'messages'; the columns are" in message_of(error)


def test_two_columns_of_the_same_name_are_refused(tmp_path):
    columns = [pa.array(["maze_1"]), pa.array(["maze_2"])]
    pq.write_table(pa.table(columns, names=["item_id", "item_id"]), tmp_path / "x.parquet")
    with pytest.raises(DatasetError, match="has two columns 'item_id'"):
        read_tasks(tmp_path / "x.parquet")


def test_files_that_cannot_be_read_say_so_in_a_line(tmp_path):
    good = write_parquet(tmp_path / "good.parquet", [openmanus_row(1)]).read_bytes()
    table = pa.table({"item_id": [f"maze_{n}" for n in range(1000)]})
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, tmp_path / "checked.parquet", **options)
    flipped = (tmp_path / "checked.parquet").read_bytes().replace(b"maze_7", b"maze_6", 1)
    files = {
        "empty.parquet": (b"", "is empty (0 bytes)"),
        "empty.json": (b"", "is empty (0 bytes)"),
        "text.parquet": (b"hello, this is no parquet file at all", "not a readable parquet file"),
        "cut.parquet": (good[: len(good) // 2], "not a readable parquet file"),
        "holes.parquet": (good[:200] + bytes(200) + good[400:], "not a readable parquet file"),
        "bad.json": (b"[1, 2", "is not valid JSON"),
        "lines.json": (b'{"item_id": 1}\n{"item_id": 2}\n', "must be .jsonl"),
        "dict.json": (b'{"item_id": "a_1"}', "must contain a list of rows, not a dict"),
        "none.json": (b"[]", "contains no rows"),
        "blank.jsonl": (b"\n\n", "contains no rows"),
        "bad.jsonl": (b'"a_1"\n{"item_id": \n', "line 2 is not valid JSON"),
        "latin.jsonl": (b'"gr\xf6\xdfe_1"\n', "line 1 is not valid JSON"),
        "deep.json": (b"[" * 100_000, "is not valid JSON"),
        "digits.json": (b"[" + b"9" * 5000 + b"]", "is not valid JSON"),
        "bits.parquet": (flipped, "not a readable parquet file"),
        "rows.csv": (b"item_id\na_1\n", "must be .parquet, .json or .jsonl"),
    }
    for name, (content, what) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DatasetError) as error:
            read_tasks(path)
        assert str(path) in message_of(error) and what in message_of(error), name


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "train.parquet").touch()
    with pytest.raises(DatasetError, match=r"dataset file .*absent\.parquet does not exist"):
        read_tasks(tmp_path / "absent.parquet")
    with pytest.raises(DatasetError, match=r"is a directory; .*\['train\.parquet'\]"):
        read_tasks(tmp_path)
    with pytest.raises(DatasetError, match="no dataset files are given"):
        read_tasks([])


def test_an_empty_table_holds_no_rows(tmp_path):
    with pytest.raises(DatasetError, match=r"none\.parquet contains no rows"):
        read_tasks(write_parquet(tmp_path / "none.parquet", []))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"item_id": None}, "item_id None must be text like 'textcraft_31'"),
        ({"item_id": 3.5}, "item_id 3.5 must be"),
        ({"item_id": True}, "item_id True must be"),
        ({"item_id": -1}, "item_id -1 must be"),
        ({"item_id": "maze_" + "9" * 5000}, "must be text like"),
        ({"item_id": float("nan")}, "item_id nan must be"),
        ({"item_id": "textcraft"}, "item_id 'textcraft' must be"),
        ({"item_id": 5}, "item_id 5 has no environment: write 'env_5' or add a column data_source"),
        ({"id": "a_1"}, r"no column 'item_id'; the columns are \['id'\]"),
        ({"item_id": "a_1", "data_source": 3}, "data_source must be text, got 3"),
        ({"item_id": "a_1", "prompt": 3}, "prompt must be a list of messages, got int"),
        ({"item_id": "a_1", "messages": "hi"}, "conversation must be a list of messages, got str"),
        (
            {"item_id": "a_1", "messages": [{"role": "robot", "content": "x"}]},
            "unknown role 'robot'",
        ),
        ({"item_id": "a_1", "messages": [{"role": "user", "content": None}]}, "under 'content'"),
        ([1], "a row must be an object or an item id, got list"),
    ],
)
def test_wrong_rows_are_named(tmp_path, row, what):
    path = write_json(tmp_path / "x.json", ["maze_1", row])
    with pytest.raises(DatasetError, match=rf"x\.json row 1: .*{what}"):
        read_tasks(path)


def test_text_that_no_tokenizer_can_read_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"item_id": "a_1", "prompt": "\ud800"}]))
    with pytest.raises(DatasetError, match=r"row 0: prompt: the text .* is not valid Unicode"):
        read_tasks(path)


def test_rows_without_conversation_are_named_where_one_is_needed(tmp_path):
    rows = [openmanus_row(1), openmanus_row(2) | {"conversations": None}]
    path = write_parquet(tmp_path / "x.parquet", rows)
    assert read_tasks(path)[1].messages == ()
    with pytest.raises(DatasetError, match=r"x\.parquet row 1: the conversation is empty"):
        read_tasks(path, needs="conversation")
