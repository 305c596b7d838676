"""`python -m envs.serve` as a process: what it says, how it fails, and when it leaves."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from env_servers import Client, listening_addresses

from envs import registry
from envs.serve import main, process_lives

SERVE = [sys.executable, "-m", "envs.serve"]


def start(*arguments: str) -> tuple["subprocess.Popen[str]", str]:
    process = subprocess.Popen([*SERVE, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, line.split(" at ")[1].strip()


def wait_for_the_end_of(pid: int) -> None:
    while process_lives(pid):
        time.sleep(0.02)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a start that fails with exit code 2."""
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    return errors


def test_an_unknown_name_lists_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "chess", "--port", "0")
    assert "unknown environment 'chess'" in message
    assert "maze" in message and "textcraft" in message and "wordle" in message


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = refusal(capsys, "maze", "--port", str(port))
    assert f"127.0.0.1:{port}" in message and "--port" in message


@pytest.mark.parametrize(
    ("flag", "value"), [("--max_sessions", "0"), ("--session_ttl", "0"), ("--port", "70000")]
)
def test_a_setting_out_of_range_is_named(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert f"{flag} must be" in refusal(capsys, "maze", "--port", "0", flag, value)


def test_a_missing_extra_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "heavy_environment.py").write_text(
        "from dataclasses import replace\n"
        "from envs.maze import SPEC as MAZE\n"
        "SPEC = replace(MAZE, requirements=lambda: 'heavy needs: pip install manus-jax[heavy]')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.ENVIRONMENTS, "heavy", "heavy_environment:SPEC")
    assert "pip install manus-jax[heavy]" in refusal(capsys, "heavy", "--port", "0")


def test_it_announces_its_url_keeps_its_bound_and_ends_cleanly_at_sigterm() -> None:
    process, url = start("maze", "--port", "0", "--max_sessions", "2")
    assert url.startswith("http://127.0.0.1:") and url.endswith("/maze")
    client = Client(url)
    assert client.get("/") == (200, "This is environment LMRL-Gym.")
    assert Client(url.removesuffix("/maze")).get("/") == (200, "This is environment LMRL-Gym.")
    assert [client.ok("/create") for _ in range(2)] == [{"id": 0}, {"id": 1}]
    assert "--max_sessions" in client.ok("/create")["error"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_it_listens_on_loopback_alone_unless_it_is_told_otherwise(host: str) -> None:
    told = [] if host == "127.0.0.1" else ["--host", host]
    process, _ = start("maze", "--port", "0", *told)
    assert listening_addresses(process.pid) == {host}
    process.terminate()
    process.wait(timeout=30)


def test_it_leaves_when_the_process_that_started_it_is_killed() -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'envs.serve', 'maze', '--port', '0']\n"
        "child = subprocess.Popen([*command, '--parent_pid', str(os.getpid())],\n"
        "                         stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server_pid = int(parent.stdout.readline())
    assert process_lives(server_pid)
    parent.kill()
    parent.wait(timeout=30)
    wait_for_the_end_of(server_pid)


def test_a_process_that_ended_counts_as_gone_before_it_is_waited_for() -> None:
    assert process_lives(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    wait_for_the_end_of(child.pid)
    assert child.returncode is None
    child.wait()
    assert not process_lives(child.pid)
