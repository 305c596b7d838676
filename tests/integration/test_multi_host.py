"""A run with several processes gives the result of one, and survives the death of processes."""

import numpy as np
import pytest
from job_processes import SCRATCH, Job, exported, metrics, steps
from safetensors.numpy import load_file

from manus_jax.models.adapter_files import read_adaptation
from manus_jax.models.loading import from_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def whole(folder):
    """Ten updates in one process of four devices, never disturbed."""
    job = Job(1, folder / "whole", *SCRATCH, devices=4)
    assert job.end() == [0], job.said(0)
    return job.run_dir


def model_of(whole):
    return f"model.path = '{whole / 'warm_start' / 'export' / '2'}'"


def assert_learned_the_same(run_dir, whole):
    """To float32 rounding: sums in another order, which ten steps of Adam carry on."""
    ours, theirs = exported(run_dir, 10), exported(whole, 10)
    assert ours.keys() == theirs.keys()
    first = exported(whole / "warm_start", 2)
    moved = max(np.abs(theirs[name] - first[name]).max() for name in theirs)
    apart = max(np.abs(ours[name] - theirs[name]).max() for name in theirs)
    assert moved > 0.02
    assert apart < 1e-5


def test_two_processes_learn_the_same_as_one_and_write_everything_once(folder, whole):
    job = Job(2, folder / "two", *SCRATCH)
    assert job.end() == [0, 0], job.said(0) + job.said(1)
    assert_learned_the_same(job.run_dir, whole)
    assert steps(job.run_dir) == list(range(1, 11))
    assert [p.name for p in (job.run_dir / "export").iterdir()] == ["10"]
    assert (job.run_dir / "report.html").exists()
    assert "report.html" in job.said(0) and "report.html" not in job.said(1)
    assert "sft 2/2" in job.said(0) and "sft 2/2" not in job.said(1)


def test_four_processes_learn_the_same_as_one(folder, whole):
    job = Job(4, folder / "four", model_of(whole))
    assert job.end() == [0] * 4, job.said(0) + job.said(1)
    assert_learned_the_same(job.run_dir, whole)


def test_a_killed_process_ends_all_and_any_number_of_processes_can_resume(folder, whole):
    """A run of two loses one, goes on as four, loses process 0, goes on as one, ends as two.

    Before the last start the newest checkpoint is damaged, so both must take the one before it.
    """
    run_dir, model = folder / "killed", model_of(whole)
    job = Job(2, run_dir, model)
    job.await_file("checkpoints/2")
    job.processes[1].kill()
    codes = job.end(timeout=120)
    assert all(codes)
    assert "tasks are unhealthy (stopped sending heartbeats):\n1\n" in job.said(0)

    job = Job(4, run_dir, model)
    job.await_file("checkpoints/5")
    job.processes[0].kill()
    codes = job.end(timeout=120)
    assert all(codes)
    for number in (1, 2, 3):
        assert "leader task was preempted/died/restarted" in job.said(number)

    assert Job(1, run_dir, model, "train.total_steps = 8", "train.export = False").end() == [0]
    (run_dir / "checkpoints" / "8" / "host" / "metadata").write_text("{}")
    job = Job(2, run_dir, model)
    assert job.end() == [0, 0], job.said(0) + job.said(1)
    assert "checkpoint 8 is damaged and was moved to" in job.said(0)
    assert "resumed at step 7" in job.said(0)
    assert steps(run_dir) == list(range(1, 11))
    assert_learned_the_same(run_dir, whole)


def test_a_critic_and_a_reference_on_the_hosts_take_part(folder, whole):
    """The reference is the policy before its first update, so of that step their KL is zero."""
    more = ("algorithm.recipe = 'ppo'", "algorithm.kl_placement = 'reward'")
    more += ("algorithm.reference = 'host'", "algorithm.kl_coef = 0.1", "train.total_steps = 2")
    job = Job(2, folder / "critic", model_of(whole), *more)
    assert job.end() == [0, 0], job.said(0) + job.said(1)
    first, second = metrics(job.run_dir)
    assert abs(first["critic/kl"]) < 1e-5 < abs(second["critic/kl"])
    assert all(np.isfinite(line["critic/loss"]) for line in (first, second))


def test_two_processes_train_adapters_of_a_model_whose_warm_start_had_adapters(folder, whole):
    more = (*SCRATCH[:3], "lora.rank = 3", "train.total_steps = 1")
    job = Job(2, folder / "adapters", model_of(whole), *more)
    assert job.end() == [0, 0], job.said(0) + job.said(1)
    adapter = load_file(job.run_dir / "export/1/adapter_model.safetensors")
    assert all(x.any() for name, x in adapter.items() if "lora_B" in name)
    # Its base is the checkpoint of the warm start; one process reads the weights that two merged.
    assert read_adaptation(job.run_dir / "export/1").base == str(job.run_dir / "warm_start")
    from_path(job.run_dir / "export/1").open()


def test_a_mistake_ends_all_processes_before_anything_is_written(folder, whole):
    job = Job(2, folder / "mistaken", model_of(whole), "train.group_size = 1")
    assert job.end() == [2, 2]
    for number in (0, 1):
        assert "error: recipe grpo compares episodes of one task" in job.said(number)
    assert not (folder / "mistaken").exists()


def test_a_mistake_on_one_host_only_is_reported_there_and_ends_the_others(folder, whole):
    """Process 0 waits for the other at a barrier, which must not be taken for its exit."""
    job = Job(2, folder / "one_host", model_of(whole), last=("train.group_size = 1",))
    codes = job.end(timeout=120)
    assert codes[1] == 2 and codes[0] != 0
    assert "error: recipe grpo compares episodes of one task" in job.said(1)
    assert "Traceback" not in job.said(1)


def test_the_gpus_of_one_machine_are_not_split_among_several(folder, whole, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    split = ("engine.name = 'vllm'", "vllm.gpus = 1")
    job = Job(2, folder / "split", model_of(whole), *split)
    assert job.end() == [2, 2]
    assert all("with several learner processes, start the" in job.said(n) for n in (0, 1))
