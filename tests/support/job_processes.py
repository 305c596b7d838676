"""Training jobs of several real processes on this machine, for tests."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
SMALL = (
    "env.names = ['maze']",
    "train.batch_size = 2",
    "train.group_size = 4",
    "train.val_tasks = 1",
    "train.val_before_train = False",
    "train.test_freq = 100",
    "train.save_freq = 1",
    "train.total_steps = 10",
    "rollout.max_turns = 2",
    "rollout.max_tokens_per_turn = 8",
    "rollout.max_total_tokens = 512",
    "engine.slots = 8",
    "data.max_length = 512",
    "data.rows = 8",
    "algorithm.reward = 'length_penalty'",
    "algorithm.reward_parameters = {'min_length': 400}",
    "optimizer.lr = 0.01",
    # With less, Adam makes whole steps of gradients that are nothing but rounding.
    "optimizer.eps = 1e-5",
    "distributed.heartbeat_s = 15",
    "distributed.timeout_s = 600",
)
SCRATCH = (
    "warm_start.steps = 2",
    "warm_start.traces = 4",
    "warm_start.batch_size = 4",
    "scratch.vocab_size = 600",
    "scratch.hidden_size = 16",
    "scratch.intermediate_size = 32",
    "scratch.num_layers = 1",
    "scratch.num_heads = 2",
    "scratch.head_dim = 8",
)


class Job:
    """`count` processes with `devices` CPU devices each, on one run directory.

    `last` are settings of the last process only.
    """

    def __init__(
        self, count: int, run_dir: Path, *more: str, devices: int = 2, last: tuple[str, ...] = ()
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.run_dir = run_dir
        environment = {
            **os.environ,
            "JAX_NUM_CPU_DEVICES": str(devices),
            "XLA_FLAGS": "--xla_backend_optimization_level=0 "
            "--xla_llvm_disable_expensive_passes=true",
        }
        run_dir.parent.mkdir(exist_ok=True)
        self._logs, self.processes = [], []
        for number in range(count):
            joined = (
                f"distributed.coordinator = '{address}'",
                f"distributed.processes = {count}",
                f"distributed.process_id = {number}",
            )
            params = (*SMALL, f"train.run_dir = '{run_dir}'", *more, *(joined if count > 1 else ()))
            if number == count - 1:
                params += last
            log = run_dir.parent / f"{run_dir.name}.{number}.log"
            self._logs.append(log)
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "manus_jax.train"]
                        + [f"--gin_param={param}" for param in params],
                        cwd=ROOT,
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def await_file(self, name: str) -> None:
        """Until the run has written it; fails when the job ends before."""
        while not (self.run_dir / name).exists():
            assert all(process.poll() is None for process in self.processes), self.said(0)
            time.sleep(0.02)

    def end(self, timeout: float = 1200) -> list[int]:
        """Exit codes of all processes; those that do not end in time are killed, and it fails."""
        try:
            return [process.wait(timeout) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def said(self, number: int) -> str:
        return self._logs[number].read_text()


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in metrics(run_dir)]


def exported(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(run_dir / "export" / str(step) / "model.safetensors")
