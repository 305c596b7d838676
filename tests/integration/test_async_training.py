"""Asynchronous training with real processes: trainers and environment servers are killed, and no
task is lost or repeated."""

import json
import random
import subprocess
import sys
import time

from free_ports import free_pair
from job_processes import ROOT, SCRATCH, Job, metrics, steps

from envs.registry import load
from manus_jax.rollout.trajectory_files import read_trajectories

TASKS = list(range(6))
STEPS = 9
BATCH = 2
OWN_DEVICE = ("engine.devices = 1",)


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
    """One process is killed twice; two processes continue and one of them is killed; one ends.

    Alone, a process gives its engine a device of its own. Validations run beside the training.
    """
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([f"maze_{item}" for item in TASKS]))
    more = (
        f"data.train_files = ['{tasks}']",
        "train.max_staleness = 2",
        "train.test_freq = 4",
        f"train.total_steps = {STEPS}",
        "train.save_freq = 1",
    )
    run_dir = tmp_path / "run"
    for processes, sign in ((1, "checkpoints/1"), (1, "checkpoints/3"), (2, "checkpoints/5")):
        job = Job(processes, run_dir, *more, *SCRATCH, *(OWN_DEVICE if processes == 1 else ()))
        job.await_file(sign)
        time.sleep(random.random() * 0.2)
        job.processes[-1].kill()
        assert all(job.end(timeout=120))
    job = Job(1, run_dir, *more, *SCRATCH, *OWN_DEVICE)
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
    validated = [line["step"] for line in lines if "val/maze/success_rate" in line]
    assert validated[-2:] == [8, 9]
    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    tracks = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert {tracks[e["pid"]] for e in trace if e["ph"] == "X"} == set(tracks.values())


SLOW_MAZE = """
import time
from envs import serve
from envs.maze.game import MazeGame
step = MazeGame.step
MazeGame.step = lambda game, action: (time.sleep(0.02), step(game, action))[1]
serve.main()
"""


def serve_maze(port):
    """A server that accepts connections, and is slow enough to be killed in the middle."""
    serve = [sys.executable, "-c", SLOW_MAZE, "maze", "--port", str(port)]
    server = subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline().startswith("serving maze")
    return server


def test_killed_environment_servers_cost_no_group_and_every_turn_is_of_the_tasks_own_game(tmp_path):
    port, count = free_pair(), 6
    server = serve_maze(port)
    job = Job(
        1,
        tmp_path / "run",
        f"env.urls = {{'maze': 'http://127.0.0.1:{port}/maze'}}",
        *("env_pool.attempts = 10", "env_pool.first_retry = 0.1", "env_pool.longest_retry = 0.5"),
        *("train.max_staleness = 2", f"train.total_steps = {count}", "rollout.max_turns = 8"),
        *SCRATCH,
    )
    try:
        for step in range(1, count - 1):
            job.await_file(f"trajectories/{step}.jsonl")
            time.sleep(random.random() * 0.2)
            server.kill()
            server.wait()
            server = serve_maze(port)
        assert job.end() == [0], job.said(0)
    finally:
        server.kill()
    lines = metrics(job.run_dir)
    failures = {k: v for k, v in lines[-1].items() if k.startswith("env_pool/maze/failures/")}
    assert sum(failures.values()) > 0
    seen = set()
    for step in range(1, count + 1):
        episodes = list(read_trajectories(job.run_dir / "trajectories" / f"{step}.jsonl"))
        assert len({e.group_id for e in episodes}) == BATCH and len(episodes) == 4 * BATCH
        assert seen.isdisjoint(e.uid for e in episodes)
        seen |= {e.uid for e in episodes}
        for episode in episodes:
            game = load("maze").new_game()
            assert game.reset(episode.task.item) == episode.first_observation
            for turn in episode.turns:
                if turn.action is not None:
                    assert game.step(turn.action).observation == turn.observation
