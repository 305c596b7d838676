"""Recorded episodes: selection, division into steps, and invalid files."""

import dataclasses
import json
import os

import numpy as np
import pytest
from made_trajectories import two_turns

from manus_jax.rollout.recorded import RecordedError, RecordedGroups, read_recorded
from manus_jax.rollout.trajectory import FailedEpisode
from manus_jax.rollout.trajectory_files import episode_record, write_trajectories


def group(name, size=2):
    episodes = [two_turns(f"{name}#{member}") for member in range(size)]
    return [
        dataclasses.replace(e, spec=dataclasses.replace(e.spec, group_id=name)) for e in episodes
    ]


def test_the_training_episodes_of_runs_are_read_and_kept_apart(tmp_path):
    for run in ("one", "two"):
        directory = tmp_path / run / "trajectories"
        failed = FailedEpisode(two_turns("lost").spec, "network", "unreachable")
        write_trajectories(directory, 1, [*group("a"), failed])
        write_trajectories(directory, 10, group("b"))
        write_trajectories(directory, "val_1", group("v"))
    read = read_recorded([str(tmp_path / "one"), str(tmp_path / "two")], 64, 100, {})
    assert [e.uid for e in read] == [
        *("0/a#0", "0/a#1", "0/b#0", "0/b#1"),
        *("1/a#0", "1/a#1", "1/b#0", "1/b#1"),
    ]
    single = tmp_path / "one" / "trajectories" / "val_1.jsonl"
    assert [e.group_id for e in read_recorded([str(single)], 64, 100, {})] == ["0/v"] * 2


def test_every_epoch_has_each_group_once_in_an_order_of_its_own():
    episodes = [e for number in range(5) for e in group(f"g{number}")]
    recorded = RecordedGroups(episodes, list, size=2, seed=3)
    taken = [[e.group_id for e in recorded.take(step)] for step in range(1, 9)]
    assert taken == [
        [e.group_id for e in RecordedGroups(episodes, list, 2, 3).take(s)] for s in range(1, 9)
    ]
    epochs = [taken[step] + taken[step + 1] for step in range(0, 8, 2)]
    assert all(len(epoch) == 8 and len({*epoch}) == 4 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_groups_without_usable_episodes_are_left_out():
    episodes = [*group("a"), *group("b")]
    usable = lambda group: [e for e in group if e.group_id == "b"]
    recorded = RecordedGroups(episodes, usable, size=8, seed=0)
    assert [e.uid for e in recorded.take(1)] == [e.uid for e in recorded.take(2)] == ["b#0", "b#1"]
    with pytest.raises(RecordedError, match="none of 2 groups has episodes"):
        RecordedGroups(episodes, lambda group: [], size=8, seed=0)


def test_episodes_that_do_not_fit_the_model_are_refused(tmp_path):
    path = str(write_trajectories(tmp_path, 1, group("a")))  # ten tokens, ids from 10 to 19
    assert len(read_recorded([path], 10, 20, {})) == 2
    with pytest.raises(RecordedError, match=r"sequence of 10 tokens, more than data.max_length"):
        read_recorded([path], 9, 20, {})
    with pytest.raises(RecordedError, match=r"has the token 19, and the model has a vocabulary"):
        read_recorded([path], 10, 19, {})
    with pytest.raises(RecordedError, match="nothing does not exist"):
        read_recorded([str(tmp_path / "nothing")], 10, 20, {})
    (tmp_path / "nothing").mkdir()
    with pytest.raises(RecordedError, match="has no episodes with tokens"):
        read_recorded([str(tmp_path / "nothing")], 10, 20, {})
    (tmp_path / "broken.jsonl").write_text("{}\n")
    with pytest.raises(RecordedError, match="line 1 is not a trajectory"):
        read_recorded([str(tmp_path / "broken.jsonl")], 10, 20, {})


def damaged(**fields):
    """An episode's line with other values and no checksum, as another program may write it."""

    def change(record):
        del record["checksum"]
        record.update(fields)

    return change


def turn(**fields):
    def change(record):
        del record["checksum"]
        record["turns"][0].update(fields)

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda record: record.update(env_reward=0.5), "does not match its checksum"),
        (damaged(env_reward=float("nan")), "a reward that is not a finite number"),
        (damaged(env_reward="1"), "a reward that is not a finite number"),
        (damaged(env_reward=True), "a reward that is not a finite number"),
        (damaged(success="no"), "has the success 'no'"),
        (damaged(score={"total": float("inf"), "components": {}, "turn_scores": None}), "a reward"),
        (damaged(segments=[[-1, *range(11, 20)]]), "a negative token"),
        (damaged(segments=[[10.5, *range(11, 20)]]), "whole numbers"),
        (damaged(segments=[["10", *range(11, 20)]]), "whole numbers"),
        (damaged(segments=[list(range(10, 19))]), "the tokens of turn 1 are not those"),
        (damaged(segments=[list(range(10, 20)), []]), "an empty sequence"),
        (damaged(segments=[[2**40, *range(11, 20)]]), "is not a trajectory"),
        (turn(log_probs=[float("nan")] * 2), "a log-prob that is not finite"),
        (turn(log_probs=[-0.1]), "the tokens of turn 0 are not those"),
        (turn(log_probs=-0.1), "is not a trajectory"),
        (turn(versions=[5.5, 5]), "whole numbers"),
        (turn(start=-4), "the tokens of turn 0 are not those"),
        (turn(start=None), "is not a trajectory"),
        (turn(reward=None), "a reward that is not a finite number"),
    ],
)
def test_damaged_episodes_are_refused(tmp_path, change, problem):
    path = write_trajectories(tmp_path, 1, group("a"))
    first, second = path.read_text().splitlines()
    record = json.loads(first)
    change(record)
    path.write_text(f"{json.dumps(record)}\n{second}\n")
    with pytest.raises(RecordedError, match=problem) as caught:
        read_recorded([str(path)], 64, 100, {})
    assert "\n" not in str(caught.value)


def test_every_flipped_bit_that_changes_an_episode_is_found(tmp_path):
    path = write_trajectories(tmp_path, 1, group("a", size=1))
    written, [good] = path.read_bytes(), read_recorded([str(path)], 64, 100, {})
    rng = np.random.default_rng(0)
    for bit in rng.choice(8 * len(written), 100, replace=False):
        changed = bytearray(written)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            [read] = read_recorded([str(path)], 64, 100, {})
        except RecordedError:
            continue
        # Only the name of the checksum, white space or the case of an exponent has changed.
        one, other = map(json.dumps, map(episode_record, (read, good)))
        assert one == other


def test_a_file_that_another_program_has_written_again_is_still_intact(tmp_path):
    path = write_trajectories(tmp_path, 1, group("a"))
    lines = [json.dumps(json.loads(line), separators=(",", ":")) for line in path.open()]
    path.write_text("".join(f"{line}\n" for line in lines))
    assert len(read_recorded([str(path)], 64, 100, {})) == 2


def test_an_episode_is_counted_once(tmp_path):
    path = write_trajectories(tmp_path, 1, [*group("a"), *group("a")])
    with pytest.raises(RecordedError, match="several episodes 'a#0'"):
        read_recorded([str(path)], 64, 100, {})


def test_runs_that_cannot_be_read_are_refused(tmp_path):
    run = tmp_path / "run"
    write_trajectories(run / "trajectories", 1, group("a"))
    (run / "model").mkdir()
    (run / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(RecordedError, match=r"tokenizer\.json is damaged"):
        read_recorded([str(run)], 64, 100, {})
    (run / "model" / "tokenizer.json").unlink()
    os.mkfifo(run / "trajectories" / "2.jsonl")
    with pytest.raises(RecordedError, match="it is not a file"):
        read_recorded([str(run)], 64, 100, {})


def test_a_resumed_run_has_the_episodes_that_it_began_with():
    episodes = [*group("a"), *group("b")]
    made = lambda given: RecordedGroups(given, list, size=2, seed=0)
    began = made(episodes).fingerprint
    made(episodes).check(began)
    made(episodes).check(None)  # of a checkpoint that does not say
    other = dataclasses.replace(episodes[0], env_reward=0.5)
    for changed in (episodes[:2], [other, *episodes[1:]], episodes[::-1]):
        with pytest.raises(RecordedError, match="not those that this run began with"):
            made(changed).check(began)
