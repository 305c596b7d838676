"""The summary of a finished run, from its directory alone."""

import json

from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.rollout.trajectory import EpisodeSpec, Trajectory, Turn
from manus_jax.rollout.trajectory_files import write_trajectories
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.run_summary import print_summary, validation_file


def episode(number: int, turns: int, success: bool) -> Trajectory:
    task = Task(env="maze", item=number, item_id=f"maze_{number}")
    said = tuple(
        Turn(f"said {number}.{i}", "move up", f"seen {number}.{i}", 0.0) for i in range(turns)
    )
    return Trajectory(
        spec=EpisodeSpec(task, f"u{number}", f"g{number}"),
        opening=(Message("user", "go"),),
        first_observation=f"first {number}",
        turns=said,
        segments=(),
        env_reward=float(success),
        success=success,
        end_reason="done" if success else "max_turns",
    )


def test_the_table_the_episodes_the_paths_and_the_next_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    directory = RunDirectory(tmp_path / "run", "")
    before = {"val/success_rate": 0.25, "val_oracle/success_rate": 1.0, "val/score": 0.2}
    directory.append_metrics({"step": 0, **before})
    directory.append_metrics({"step": 1, "actor/pg_loss": 0.5})
    directory.append_metrics({"step": 2, "val/success_rate": 0.75, "val/score": 0.7})
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "val/success_rate": 1.0})[:-4])  # cut short by a kill
    played = [episode(0, 1, True), episode(1, 3, False), episode(2, 2, True), episode(3, 1, True)]
    write_trajectories(directory.path / "trajectories", validation_file(2), played)
    (directory.path / "export" / "2").mkdir(parents=True)

    print_summary(directory, ("oracle",), "python -m manus_jax.train --gin_file=next.gin")

    text = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert "0.250" in rows["before training (step 0)"]
    assert "0.750" in rows["after training (step 2)"]
    assert "1.000" in rows["oracle"]
    titles = [line for line in text.splitlines() if "maze_" in line]
    assert [t.split("maze_")[1][:6] for t in titles] == ["2: won", "0: won", "1: not"]
    assert "▶ said 1.2" in text and "seen 1.2" in text
    assert "export/2" in text and "metrics.jsonl" in text and "report" not in text
    assert text.splitlines()[-1].split() == [
        "next",
        "python",
        "-m",
        "manus_jax.train",
        "--gin_file=next.gin",
    ]


def test_damaged_episodes_and_leftovers_of_an_export_do_not_fail_a_finished_run(tmp_path, capsys):
    directory = RunDirectory(tmp_path / "run", "")
    directory.append_metrics({"step": 2, "val/success_rate": 0.75, "val/score": "?"})
    (directory.path / "trajectories").mkdir()
    (directory.path / "trajectories" / "val_2.jsonl").write_bytes(b'{"uid": \xff\n')
    for name in ("2", ".4.tmp-123", "notes"):
        (directory.path / "export" / name).mkdir(parents=True)
    print_summary(directory, (), "")
    text = capsys.readouterr().out
    assert "no sample episodes: " in text and "val_2.jsonl line 1 is not a trajectory" in text
    assert "export/2\n" in text
