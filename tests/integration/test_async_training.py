"""Asynchronous training with real processes: killed and resumed, no task is lost or repeated."""

import json
import random
import time

from job_processes import SCRATCH, Job, metrics, steps

from manus_jax.rollout.trajectory_files import read_trajectories

TASKS = list(range(6))
STEPS = 9
BATCH = 2


def trained_groups(run_dir):
    """The item of every group that was trained on, by the group's number."""
    groups = {}
    for step in range(1, STEPS + 1):
        episodes = list(read_trajectories(run_dir / "trajectories" / f"{step}.jsonl"))
        for group_id, item in {e.group_id: e.task.item for e in episodes}.items():
            batch, row = group_id.split(":")[0].split(".0/")
            number = (int(batch) - 1) * BATCH + int(row)
            assert number not in groups, f"{group_id} was trained on twice"
            groups[number] = item
    return groups


def groups_in_flight(run_dir):
    """The same for the groups that the last checkpoint holds, by the rows of their tasks."""
    host = json.loads((run_dir / "checkpoints" / str(STEPS) / "host" / "metadata").read_text())
    stream = host["rollouts"]["stream"]
    ready = [[group["number"], group["place"]] for group in stream["ready"]]
    return {number: TASKS[row] for number, (_, row) in stream["running"] + ready}


def test_after_kills_every_task_is_trained_on_once_per_epoch(tmp_path):
    """One process is killed twice; two processes continue and one of them is killed; one ends."""
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([f"maze_{item}" for item in TASKS]))
    more = (
        f"data.train_files = ['{tasks}']",
        "train.max_staleness = 2",
        f"train.total_steps = {STEPS}",
        "train.save_freq = 1",
    )
    run_dir = tmp_path / "run"
    for processes, sign in ((1, "checkpoints/1"), (1, "checkpoints/3"), (2, "checkpoints/5")):
        job = Job(processes, run_dir, *more, *SCRATCH)
        job.await_file(sign)
        time.sleep(random.random() * 0.2)
        job.processes[-1].kill()
        assert all(job.end(timeout=120))
    job = Job(1, run_dir, *more, *SCRATCH)
    assert job.end() == [0], job.said(0)

    assert steps(run_dir) == list(range(1, STEPS + 1))
    trained, in_flight = trained_groups(run_dir), groups_in_flight(run_dir)
    assert len(trained) == BATCH * STEPS and not trained.keys() & in_flight.keys()
    every = trained | in_flight
    assert sorted(every) == list(range(len(every)))
    for first in range(0, len(trained), len(TASKS)):
        assert sorted(every[number] for number in range(first, first + len(TASKS))) == TASKS
    lines = metrics(run_dir)
    assert all(0 <= line["staleness/mean"] <= line["staleness/max"] <= 2 for line in lines)
    assert max(line["staleness/max"] for line in lines) >= 1
    assert all("timing_s/idle_engine" in line for line in lines)
