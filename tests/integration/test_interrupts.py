"""Commands that are interrupted end with one line and leave nothing running."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize("module", ["manus_jax.evaluate", "envs.serve"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_a_command_is_imported_is_one_line(module, name, tmp_path):
    number = signal.Signals[name]
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, signal, time\n"
        "def interrupt():\n"
        "    while 'numpy' not in sys.modules and 'uvicorn' not in sys.modules:\n"
        "        time.sleep(0.001)\n"
        f"    signal.raise_signal(signal.{name})\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    what = {"SIGINT": "interrupted", "SIGTERM": "terminated"}[name]
    assert ended.returncode == -number
    assert ended.stderr == f"{what} before anything was started\n"


def test_ctrl_c_in_a_garbage_collection_during_imports_is_not_lost(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import gc, signal, sys\n"
        "def interrupt(phase, _):\n"
        "    if 'numpy' in sys.modules:\n"
        "        gc.callbacks.clear()\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "gc.callbacks.append(interrupt)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-m", "manus_jax.evaluate"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == "interrupted before anything was started\n"


def test_an_evaluation_ends_at_sigterm_with_its_servers(tmp_path):
    policies = "--gin_param=evaluate.policies = ['random']"
    out = f"--gin_param=evaluate.out_dir = '{tmp_path}'"
    more = ["--gin_param=env.names = ['maze']", "--gin_param=evaluate.samples = 5000"]
    command = [sys.executable, "-m", "manus_jax.evaluate", policies, out, *more]
    status = tmp_path / "status.json"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not status.exists():
            time.sleep(0.02)
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
        )
        servers = [int(pid) for pid in found.stdout.split()]
        process.terminate()
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 143
    assert errors == "terminated; results of unfinished policies are lost\n"
    assert (json.loads(status.read_text())["state"], len(servers)) == ("stopped", 1)
    for pid in servers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
