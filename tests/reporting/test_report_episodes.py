"""The episodes on the page: a selection, shown completely and correctly."""

import dataclasses
import json
from pathlib import Path

from report_runs import advantages_of, new_run, played

from manus_jax.data.chat import END_OF_TURN
from manus_jax.reporting import episodes
from manus_jax.reporting.episodes import TokenTexts, browser_data, evenly_spaced, shortened
from manus_jax.rollout.trajectory import FailedEpisode
from manus_jax.rollout.trajectory_files import write_trajectories


def test_the_first_some_between_and_the_last_are_chosen() -> None:
    assert evenly_spaced(list(range(5)), 9) == [0, 1, 2, 3, 4]
    assert evenly_spaced(list(range(103)), 8) == [0, 20, 40, 60, 80, 100, 101, 102]


def test_a_turn_shows_its_tokens_with_log_probs_and_advantages(tmp_path: Path) -> None:
    directory, tokenizer = new_run(tmp_path)
    won = played(tokenizer, "maze_3#0", [("go up", "a wall", 0.25), ("go down", "out", 0.75)])
    other = played(tokenizer, "maze_3#1", [("go up", "a wall", 0.0)])
    learned = {won.uid: advantages_of(won, 1 / 3)}
    write_trajectories(tmp_path / "trajectories", 7, [won, other], learned)
    [file] = browser_data(directory.path)["files"]
    assert (file["step"], file["validation"], file["total"]) == (7, False, 2)
    shown, unlearned = file["episodes"]
    assert (shown["won"], shown["reward"], shown["env"]) == (True, 1.0, "maze")
    first, second = shown["turns"]
    assert "".join(first["tokens"]) == "go up" + END_OF_TURN
    assert first["log_probs"] == [-0.5 * (1 + i) for i in range(len(first["ids"]))]
    assert set(second["advantages"]) == {0.3333}
    assert (second["action"], second["observation"], second["reward"]) == ("go down", "out", 0.75)
    assert "advantages" not in unlearned["turns"][0]


def test_a_character_in_several_tokens_is_one_character(tmp_path: Path) -> None:
    directory, tokenizer = new_run(tmp_path)
    texts = TokenTexts.of_model(directory.model, [])
    assert texts is not None
    for text in ("\u65e5\u672c go \U0001f389", "\u00fc"):
        ids = tokenizer(text)["input_ids"]
        pieces = texts(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == text
    cut = tokenizer("\u65e5")["input_ids"][:2]
    assert "".join(texts(cut)) == "\ufffd"


def test_without_a_tokenizer_the_text_is_shown(tmp_path: Path) -> None:
    _, tokenizer = new_run(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    write_trajectories(tmp_path / "trajectories", 1, [played(tokenizer, "a#0", [("go", "x", 1.0)])])
    [turn] = browser_data(tmp_path)["files"][0]["episodes"][0]["turns"]
    assert turn["text"] == "go" and "tokens" not in turn


def test_won_lost_and_failed_of_every_environment_are_among_the_few(tmp_path: Path) -> None:
    _, tokenizer = new_run(tmp_path)
    lost = [played(tokenizer, f"maze_{i}#0", [("go", "x", 0.0)]) for i in range(60)]
    won = played(tokenizer, "maze_99#0", [("go", "x", 1.0)])
    other = played(tokenizer, "babyai_1#0", [("go", "x", 0.0)], env="babyai")
    failed = FailedEpisode(dataclasses.replace(won.spec, uid="f"), "timeout", "no answer", 2)
    write_trajectories(tmp_path / "trajectories", 1, [*lost, won, other, failed])
    [file] = browser_data(tmp_path)["files"]
    assert (len(file["episodes"]), file["total"]) == (episodes.EPISODES_PER_FILE, 63)
    assert [e["number"] for e in file["episodes"][-3:]] == [60, 61, 62]
    assert file["episodes"][-1]["failed"] == {"kind": "timeout", "error": "no answer"}


def test_a_long_run_stays_within_its_characters(tmp_path: Path) -> None:
    _, tokenizer = new_run(tmp_path)
    episode = played(tokenizer, "maze_1#0", [("go up " * 40, "x" * 3000, 1.0)] * 5)
    folder = tmp_path / "trajectories"
    path = write_trajectories(folder, 1, [episode] * 30)
    for step in range(2, 40):
        (folder / f"{step}.jsonl").write_bytes(path.read_bytes())
    data = browser_data(tmp_path, characters=400_000)
    assert 200_000 < len(json.dumps(data)) < 420_000
    steps = [file["step"] for file in data["files"]]
    assert (steps[0], steps[-3:], data["total_files"]) == (1, [37, 38, 39], 39)
    assert len(steps) == episodes.TRAIN_FILES
    assert all(file["total"] == 30 for file in data["files"])
    assert all(file["episodes"] for file in data["files"])


def test_one_huge_episode_cannot_break_the_bound(tmp_path: Path) -> None:
    _, tokenizer = new_run(tmp_path)
    huge = played(tokenizer, "maze_1#0", [("go", "x" * 100_000, 1.0)] * 100)
    small = played(tokenizer, "maze_2#0", [("go", "y", 0.0)])
    write_trajectories(tmp_path / "trajectories", 1, [huge, small])
    data = browser_data(tmp_path, characters=100_000)
    assert [e["id"] for e in data["files"][0]["episodes"]] == ["maze_2"]


def test_a_half_written_line_is_counted_and_left_out(tmp_path: Path) -> None:
    _, tokenizer = new_run(tmp_path)
    path = write_trajectories(
        tmp_path / "trajectories", 1, [played(tokenizer, "a#0", [("go", "x", 1.0)])] * 2
    )
    path.write_bytes(path.read_bytes()[:-40])
    [file] = browser_data(tmp_path)["files"]
    assert (len(file["episodes"]), file["unreadable"]) == (1, 1)


def test_a_run_without_trajectories_has_none(tmp_path: Path) -> None:
    assert browser_data(tmp_path) == {"files": [], "total_files": 0, "problems": []}


def test_long_texts_lose_their_middle() -> None:
    assert shortened("a" * 10, 10) == "a" * 10
    assert (
        shortened("a" * 9 + "b" * 9, 12) == "a" * 9 + "\n[\u2026 6 characters \u2026]\n" + "b" * 3
    )
