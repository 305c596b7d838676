"""Fixtures of the environment tests: servers in processes of their own, or in threads."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from env_servers import AppServer

from envs import sessions


@pytest.fixture(scope="module")
def served() -> Iterator[Callable[[str], str]]:
    """name → base URL of `python -m envs.serve name`, one process per name and module."""
    processes: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def start(name: str) -> str:
        if name not in processes:
            command = [sys.executable, "-m", "envs.serve", name, "--port", "0"]
            command += ["--parent_pid", str(os.getpid())]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"serving {name} at http://127.0.0.1:"), line
            processes[name] = process, line.split(" at ")[1].strip()
        return processes[name][1]

    yield start
    for process, _ in processes.values():
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture
def serve_app() -> Iterator[AppServer]:
    """Application → base URL, served until the end of the test."""
    server = AppServer()
    yield server
    server.stop()


@pytest.fixture
def counted_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Session ids 0, 1, 2, … instead of random ones, so that expected answers can be fixed."""
    monkeypatch.setattr(sessions, "new_id", itertools.count().__next__)
