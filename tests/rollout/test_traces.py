"""Recorded oracle episodes: OpenManus-RL's columns, and conversations that replay to a win."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.registry import load
from manus_jax import command
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.traces import main

# The schema of OpenManus-RL's textcraft-train.parquet, as pyarrow prints it.
OPENMANUS_COLUMNS = {
    "data_source": "string",
    "item_id": "string",
    "conversations": "list<element: struct<from: string, loss: bool, value: string>>",
    "prompt": "list<element: struct<content: string, role: string>>",
    "ability": "string",
    "reward_model": "struct<ground_truth: string, style: string>",
    "extra_info": "struct<conversations: string, index: int64, split: string>",
}


def write(tmp_path: Path, *arguments: str) -> pa.Table:
    out = tmp_path / "traces" / "out.parquet"
    main([*arguments, "--out", str(out)])
    return pq.read_table(out)


def action_of(turn: str) -> str:
    return turn.split("Action:\n")[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["textcraft", "maze", "wordle"])
def test_traces_have_openmanus_columns_and_replay_to_a_win(name: str, tmp_path: Path) -> None:
    table = write(tmp_path, name, "--n", "5", "--split", "train", "--seed", "3")
    assert {field.name: str(field.type) for field in table.schema} == OPENMANUS_COLUMNS
    spec = load(name)
    for index, row in enumerate(table.to_pylist()):
        item = int(row["item_id"].removeprefix(f"{name}_"))
        assert item in spec.items("train")
        assert (row["data_source"], row["ability"]) == (name, "agent-reasoning")
        conversation: list[dict[str, Any]] = row["conversations"]
        assert json.loads(row["reward_model"]["ground_truth"]) == conversation
        assert json.loads(row["extra_info"]["conversations"]) == conversation
        assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (index, "train")
        turns = len(conversation) // 2
        assert [turn["from"] for turn in conversation] == ["human", "gpt"] * turns
        prompt = row["prompt"]
        assert prompt[0]["role"] == "user" and PROMPTS[name].instruction in prompt[0]["content"]
        shown = len(prompt) - 1  # messages with the instruction and an example, not trained on
        assert [turn["value"] for turn in conversation[:shown]] == [
            m["content"] for m in prompt[:-1]
        ]
        losses = [None, False] * (shown // 2) + [None, True] * (turns - shown // 2)
        assert [turn["loss"] for turn in conversation] == losses
        game = spec.new_game()
        assert conversation[shown]["value"] == f"{prompt[-1]['content']}\n\n{game.reset(item)}"
        episode = conversation[shown:]
        for agent, human in zip(episode[1::2], episode[2::2], strict=False):
            assert game.step(action_of(agent["value"])).observation == human["value"]
        last = game.step(action_of(conversation[-1]["value"]))
        assert last.done and last.reward == 1


@pytest.mark.slow
def test_the_seed_chooses_the_items(tmp_path: Path) -> None:
    def drawn(seed: str) -> list[str]:
        table = write(tmp_path, "maze", "--n", "8", "--split", "test", "--seed", seed)
        ids: list[str] = table["item_id"].to_pylist()
        return ids

    assert drawn("1") == drawn("1") != drawn("2")
    assert len(set(drawn("1"))) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chess", "--n", "1"], "unknown environment 'chess'; there are: alfworld, babyai"),
        (["maze", "--n", "0"], "--n: 0 must be at least 1"),
        (["maze", "--n", "1", "--split", "dev"], "there are: train, test"),
        (["maze", "--n", "201", "--split", "test"], "maze has 200 items in test, not 201"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["traces", *arguments, "--out", str(tmp_path / "x.parquet")])
    with pytest.raises(SystemExit) as exited:
        command.run(main)
    assert exited.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "x.parquet").exists()
