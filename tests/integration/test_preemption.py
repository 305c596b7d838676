"""Repeated preemption: SIGTERM on any host saves the step and ends all processes."""

import json
import signal

from job_processes import SCRATCH, Job, steps


def end_in_status(run_dir):
    status = json.loads((run_dir / "status.json").read_text())
    return status["state"], status["exit_code"]


def test_a_run_that_is_preempted_every_few_steps_still_finishes(tmp_path):
    run_dir = tmp_path / "run"
    more = (*SCRATCH, "train.total_steps = 5", "train.save_freq = 100")
    done, stops = 0, 0
    while True:
        job = Job(2, run_dir, *more)
        if done >= 3:
            break
        job.await_file(f"trajectories/{done + 1}.jsonl")
        job.processes[stops % 2].send_signal(signal.SIGTERM)  # on one host, then on the other
        codes = job.end()
        assert codes == [143, 143], job.said(0) + job.said(1)
        assert end_in_status(run_dir) == ("stopped", 143)
        assert f"stopped after step {steps(run_dir)[-1]} of 5, which is saved" in job.said(1)
        assert steps(run_dir)[-1] > done
        done, stops = steps(run_dir)[-1], stops + 1
    assert job.end() == [0, 0], job.said(0) + job.said(1)
    assert end_in_status(run_dir) == ("finished", 0)
    assert stops >= 2
    assert steps(run_dir) == list(range(1, 6))
    assert [p.name for p in (run_dir / "export").iterdir()] == ["5"]


def test_a_preemption_before_the_first_step_ends_all_processes_with_the_same_code(tmp_path):
    job = Job(2, tmp_path / "run", *SCRATCH)
    job.await_file("warm_start")
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.end() == [143, 143], job.said(0) + job.said(1)
    assert "which is saved" in job.said(0)
