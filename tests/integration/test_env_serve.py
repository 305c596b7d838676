"""`python -m envs.serve` as a process: output, errors and exit."""

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
    process = subprocess.Popen(
        [*SERVE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
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
    ("flag", "value"),
    [
        ("--max_sessions", "0"),
        ("--max_sessions", "99999999999"),
        ("--max_sessions_per_client", "-1"),
        ("--session_ttl", "0"),
        ("--session_ttl", "nan"),
        ("--session_ttl", "inf"),
        ("--port", "70000"),
        ("--port", "-1"),
        ("--host", ""),
        ("--parent_pid", "0"),
        ("--parent_pid", "-1"),
        ("--parent_pid", "99999999999"),
    ],
)
def test_a_setting_out_of_range_is_named(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    port = [] if flag == "--port" else ["--port", "0"]
    assert f"{flag} must be" in refusal(capsys, "maze", *port, f"{flag}={value}")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["maze"], "arguments are required: --port"),
        (["maze", "--port", "x"], "--port: invalid int value: 'x'"),
        (["maze", "--por", "0"], "arguments are required: --port"),
        (["maze", "--port", "0", "--port=1"], "--port is given twice"),
        (["maze", "--port=--"], "--port=-- has no value"),
        (["maze", "--port", "0", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["maze", "--port", "0", "--host", "no.such.host.invalid"], "choose another --host"),
        (["maze", "--port", "0", "--host", "h" * 300], "choose another --host"),
        (["maze", "--port", "0", "--host", "1.2.3.4"], "cannot listen on 1.2.3.4:0"),
        (["maze", "--port", "0", "--api_key_file", "absent"], "absent cannot be read"),
        (["maze", "--port", "0", "--api_key_file", "/dev/zero"], "/dev/zero is not a file"),
        ([":", "--port", "0"], "unknown environment ':'"),
        ([".maze:SPEC", "--port", "0"], "unknown environment '.maze:SPEC'"),
        (["json:SPEC", "--port", "0"], "'json' has no EnvironmentSpec 'SPEC'"),
        (["broken_env:SPEC", "--port", "0"], "broken_env.py, line 2"),
        (["lacking_env:SPEC", "--port", "0"], "No module named 'nowhere'"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    reason: str,
) -> None:
    (tmp_path / "broken_env.py").write_text("x = 1\ny = =\n")
    (tmp_path / "lacking_env.py").write_text("import nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert reason in refusal(capsys, *arguments)


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"\xff\xfe", "schlüssel".encode()])
def test_a_key_that_cannot_be_sent_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    message = refusal(capsys, "maze", "--port", "0", "--api_key_file", str(file))
    assert str(file) in message


def test_the_error_for_a_missing_extra_names_the_package_to_install(
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
    assert all("id" in client.ok("/create") for _ in range(2))
    assert "--max_sessions" in client.ok("/create")["error"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("host", "key"), [("127.0.0.1", ""), ("0.0.0.0", ""), ("0.0.0.0", "s3cret")]
)
def test_it_listens_on_loopback_alone_by_default_and_warns_without_a_key(
    host: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANUS_JAX_ENV_KEY", key)
    flags = [] if host == "127.0.0.1" else ["--host", host]
    process, url = start("maze", "--port", "0", *flags)
    assert listening_addresses(process.pid) == {host}
    client = Client(url.replace("0.0.0.0", "127.0.0.1"))
    assert client.get("/")[0] == (401 if key else 200)
    process.terminate()
    _, errors = process.communicate(timeout=30)
    warned = "warning: 0.0.0.0 can be reached from the network and there is no API key" in errors
    assert warned == (host == "0.0.0.0" and not key) and errors.count("\n") == warned


def test_it_ends_at_sigterm_although_a_step_never_returns(tmp_path: Path) -> None:
    (tmp_path / "stuck_env.py").write_text(
        "import threading\n"
        "from dataclasses import replace\n"
        "from envs.maze import SPEC as MAZE\n"
        "class Stuck(MAZE.new_game):\n"
        "    def step(self, action): threading.Event().wait()\n"
        "SPEC = replace(MAZE, new_game=Stuck, cheap=False)\n"
    )
    script = "from envs import serve; serve.STOP_SECONDS = 1; serve.main()"
    command = [sys.executable, "-c", script, "stuck_env:SPEC", "--port", "0"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout is not None
    url = process.stdout.readline().split(" at ")[1].strip()
    client = Client(url)
    session = client.ok("/create")["id"]
    client.ok("/reset", {"id": session, "game": 1})
    client.start("/step", {"id": session, "action": "move up"})
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


def test_it_exits_when_the_process_that_started_it_is_killed() -> None:
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
