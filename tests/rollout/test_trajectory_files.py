"""Trajectories are read back from disk unchanged, including their tokens."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from made_trajectories import forked, two_turns

from manus_jax.rewards import Score
from manus_jax.rollout.trajectory import FailedEpisode, Outcome, Trajectory
from manus_jax.rollout.trajectory_files import (
    parse_episode,
    read_trajectories,
    write_trajectories,
)


def same(ours: Outcome, theirs: Outcome) -> bool:
    if isinstance(ours, FailedEpisode):
        return ours == theirs
    assert isinstance(theirs, Trajectory)
    for mine, other in zip(ours.segments, theirs.segments, strict=True):
        for field in dataclasses.fields(mine):
            left, right = getattr(mine, field.name), getattr(other, field.name)
            if left is None:
                assert right is None
                continue
            assert left.dtype == right.dtype
            assert left.tolist() == right.tolist()
    rest = {field.name for field in dataclasses.fields(ours)} - {"segments"}
    return all(getattr(ours, name) == getattr(theirs, name) for name in rest)


def test_written_trajectories_are_read_back(tmp_path: Path) -> None:
    scored = dataclasses.replace(
        two_turns(), score=Score(0.5, {"env": 0.5}, (0.25, 0.25)), attempts=2, prompts_extended=1
    )
    failed = FailedEpisode(two_turns("x").spec, "timeout", "no answer", 2)
    spoken = dataclasses.replace(two_turns("y"), segments=(), end_reason="gave_up")
    outcomes = [scored, forked(), failed, spoken]
    path = write_trajectories(tmp_path / "trajectories", 12, outcomes)
    assert path == tmp_path / "trajectories" / "12.jsonl"
    back = list(read_trajectories(path))
    assert len(back) == 4
    assert all(same(ours, theirs) for ours, theirs in zip(outcomes, back, strict=True))


def test_a_line_holds_the_text_and_the_ids_for_people_and_programs(tmp_path: Path) -> None:
    [line] = write_trajectories(tmp_path, 0, [two_turns()]).read_text().splitlines()
    record = json.loads(line)
    assert [turn["text"] for turn in record["turns"]] == ["turn 0", "turn 1"]
    assert record["segments"] == [list(range(10, 20))]
    assert record["turns"][0]["versions"] == [5, 5]
    assert record["turns"][0]["log_probs"] == [-0.4, -0.5]
    assert (record["episode_reward"], record["uid"]) == (1.0, "maze_3#0")


def test_any_float32_comes_back_to_the_bit(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_exponential(5).astype(np.float32) * -1e-6
    trajectory = two_turns()
    [segment] = trajectory.segments
    log_probs = segment.log_probs.copy()
    log_probs[segment.loss_mask] = values
    changed = dataclasses.replace(segment, log_probs=log_probs)
    outcome = dataclasses.replace(trajectory, segments=(changed,))
    [back] = read_trajectories(write_trajectories(tmp_path, 1, [outcome]))
    assert back.segments[0].log_probs.tobytes() == log_probs.tobytes()


def test_odd_characters_do_not_break_the_file(tmp_path: Path) -> None:
    turns = two_turns().turns
    odd = dataclasses.replace(turns[0], text="line\u2028break \x00 \ud800 ünï 🙂")
    outcome = dataclasses.replace(two_turns(), turns=(odd, turns[1]))
    [back] = read_trajectories(
        write_trajectories(
            tmp_path,
            1,
            [outcome],
        )
    )
    assert back.turns[0].text == "line\u2028break \x00 ? ünï 🙂"


def test_a_step_written_again_replaces_the_file(tmp_path: Path) -> None:
    write_trajectories(tmp_path, 3, [two_turns(), forked()])
    path = write_trajectories(tmp_path, 3, [forked()])
    assert [outcome.uid for outcome in read_trajectories(path)] == ["maze_5#0"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["3.jsonl"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, 3, [two_turns()])
    path.write_text(path.read_text() + '{"uid": "x"}\n')
    message = r"3\.jsonl line 2 is not a trajectory: KeyError\('task'\)"
    with pytest.raises(ValueError, match=message):
        list(read_trajectories(path))


def test_advantages_of_the_learned_episodes_stand_beside_the_log_probs(tmp_path: Path) -> None:
    """forked() has segments of 9 and 11 tokens, with turns at 4..6, 7..9 and 7..11."""
    learned, other = forked(), two_turns()
    failed = FailedEpisode(two_turns("x").spec, "timeout", "no answer", 2)
    advantages = [np.zeros(9, np.float32), np.zeros(11, np.float32)]
    advantages[0][[4, 5, 7, 8]] = 0.1, 0.2, -0.3, 0.4
    advantages[1][7:11] = np.float32(1) / 3
    path = write_trajectories(tmp_path, 4, [learned, other, failed], {learned.uid: advantages})
    lines = [parse_episode(line) for line in path.read_bytes().splitlines()]
    assert json.loads(path.read_text().splitlines()[0])["turns"][1]["advantages"] == [-0.3, 0.4]
    assert [line.advantages is None for line in lines] == [False, True, True]
    assert lines[0].advantages is not None
    for ours, theirs in zip(advantages, lines[0].advantages, strict=True):
        assert theirs.dtype == np.float32
        assert ours.tolist() == theirs.tolist()
    outcomes = list(read_trajectories(path))
    assert all(same(a, b) for a, b in zip([learned, other, failed], outcomes, strict=True))


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "7", '{"uid": "x", "turns": [1]}', b"\xff{}", "[" * 10**5]
)
def test_lines_that_are_not_episodes_are_value_errors(line: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_episode(line)
