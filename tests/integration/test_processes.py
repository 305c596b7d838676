"""Real server processes of the project's own environments: started, killed, restarted, ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from retried import played

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.environments import embedded_server, open_environments
from manus_jax.agentgym.table import ENVIRONMENTS
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.servers import processes
from manus_jax.servers.health import BackOff
from manus_jax.servers.processes import (
    ServerProcess,
    ServerSetupError,
    ServerSupervisor,
    SupervisorSettings,
)

EAGER = SupervisorSettings(back_off=BackOff(first=0.05, limit=0.1))


def eventually(true: Callable[[], object]) -> None:
    """Waits for what other processes do; a hang ends at pytest's own time limit."""
    while not true():
        time.sleep(0.02)


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def supervisor() -> Iterator[Callable[..., ServerSupervisor]]:
    made = []

    def make(names: list[str], *arguments: object, **options: object) -> ServerSupervisor:
        commands = [embedded_server(name) for name in names]
        made.append(ServerSupervisor(commands, *arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.stop()


def episode(session: Session) -> str:
    view = session.reset(3)
    session.step("inventory")
    return view


def test_servers_are_played_restarted_when_killed_and_ended_with_the_block() -> None:
    with open_environments({"textcraft": "embedded"}, servers_per_env=2, supervision=EAGER) as pool:
        before = pool.problems()
        assert len(set(before)) == 2
        view = played(pool, "textcraft", episode)
        assert "Goal: craft" in view
        children = [int(pid) for pid in child_pids() if "textcraft" in command_line(pid)]
        assert len(children) == 2
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not set(before) & set(pool.problems()))
        # The same item on the new server is the same task.
        assert played(pool, "textcraft", episode) == view
        successors = [int(pid) for pid in child_pids() if "textcraft" in command_line(pid)]
        assert not set(children) & set(successors)
    assert not any(running(pid) for pid in children + successors)


def child_pids() -> list[str]:
    tasks = Path(f"/proc/{os.getpid()}/task")
    return [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def command_line(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def test_a_server_killed_in_mid_episode_costs_one_retry() -> None:
    with open_environments({"maze": "embedded"}, supervision=EAGER) as pool:
        attempts = []

        def interrupted(session: Session) -> str:
            attempts.append(session.root)
            view = session.reset(3)
            if len(attempts) == 1:
                for pid in child_pids():
                    if "maze" in command_line(pid):
                        os.kill(int(pid), signal.SIGKILL)
                        eventually(lambda pid=pid: not running(int(pid)))
            session.step("move up")
            return view

        assert "goal" in played(pool, "maze", interrupted)
        assert len(attempts) == 2
        assert pool.counters()["maze/failures/connection"] >= 1


def test_an_embedded_server_that_hangs_is_replaced_and_the_episode_played() -> None:
    impatient = EnvPoolSettings(read_timeout=1.0, attempts=6, first_retry=0.05, broken_after=2)
    with open_environments({"maze": "embedded"}, 1, impatient, EAGER) as pool:
        [pid] = [pid for pid in child_pids() if "maze" in command_line(pid)]
        os.kill(int(pid), signal.SIGSTOP)
        assert "goal" in played(pool, "maze", lambda session: session.reset(3))
        assert not running(int(pid))
        assert pool.counters()["maze/failures/timeout"] >= 2


def test_a_server_that_does_not_start_is_reported_with_its_output(
    supervisor: Callable[..., ServerSupervisor],
) -> None:
    with pytest.raises(ServerSetupError) as caught:
        supervisor(["texcraft"]).start()
    assert "the texcraft server ended with status 2; it wrote:" in str(caught.value)
    assert "unknown environment 'texcraft'" in str(caught.value)


def test_one_server_that_does_not_come_up_ends_the_others(
    supervisor: Callable[..., ServerSupervisor],
) -> None:
    mixed = supervisor(["maze", "texcraft"])
    with pytest.raises(ServerSetupError):
        mixed.start()
    assert not any(running(pid) for pid in mixed.pids())


def test_a_port_in_use_is_reported_by_the_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = ServerProcess(embedded_server("textcraft", port=taken.getsockname()[1]))
        process.wait(timeout=60)
    assert process.exit_status == 2
    assert "cannot listen on" in process.tail
    assert process.url is None


def stand_in(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Every server process runs this script instead of an environment."""
    popen = subprocess.Popen

    def started(command: list[str], **options: object) -> subprocess.Popen:
        return popen([sys.executable, "-c", script], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(processes.subprocess, "Popen", started)


def test_a_server_without_output_is_killed_at_the_startup_timeout(
    supervisor: Callable[..., ServerSupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "print('loading…', flush=True); import time; time.sleep(600)")
    silent = supervisor(["maze"], SupervisorSettings(startup_timeout=1.0))
    with pytest.raises(ServerSetupError, match="did not serve within 1 s; it wrote:\nloading"):
        silent.start()
    assert not any(running(pid) for pid in silent.pids())


def test_a_server_that_keeps_dying_is_given_up_with_the_end_of_its_log(
    supervisor: Callable[..., ServerSupervisor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    signal_to_die = tmp_path / "die"
    stand_in(
        monkeypatch,
        "import os, time; print('serving maze at http://127.0.0.1:1', flush=True)\n"
        f"while not os.path.exists({str(signal_to_die)!r}): time.sleep(0.01)\n1 / 0",
    )
    given_up = []
    doomed = supervisor(
        ["maze"],
        SupervisorSettings(max_restarts=2, back_off=BackOff(first=0.01)),
        on_given_up=lambda *report: given_up.append(report),
    )
    assert doomed.start() == ["http://127.0.0.1:1"]
    signal_to_die.touch()
    eventually(lambda: given_up)
    [(env, url, reason)] = given_up
    assert (env, url) == ("maze", "http://127.0.0.1:1")
    assert "given up after 2 restarts" in reason
    assert "ZeroDivisionError" in reason
    assert doomed.pids() == []


def test_a_server_that_ignores_the_request_to_end_is_killed(
    supervisor: Callable[..., ServerSupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        monkeypatch,
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('serving maze at http://127.0.0.1:1', flush=True); time.sleep(600)",
    )
    stubborn = supervisor(["maze"], SupervisorSettings(stop_timeout=0.2))
    stubborn.start()
    [pid] = stubborn.pids()
    stubborn.stop()
    assert not running(pid)


def test_a_server_that_no_longer_answers_is_replaced(
    supervisor: Callable[..., ServerSupervisor],
) -> None:
    replaced = []
    keeper = supervisor(["maze"], EAGER, on_serving=lambda *report: replaced.append(report))
    [url] = keeper.start()
    [pid] = keeper.pids()
    os.kill(pid, signal.SIGSTOP)
    keeper.replace("maze", url)
    eventually(lambda: len(replaced) == 2)
    assert replaced[0] == ("maze", url, None)
    env, new, old = replaced[1]
    assert (env, old) == ("maze", url)
    assert not running(pid)
    session = Session(ENVIRONMENTS["maze"], new)
    session.create()
    session.close()


@pytest.mark.parametrize("stopped_first", [False, True], ids=["healthy", "hanging"])
def test_servers_are_gone_when_their_parent_is_killed(stopped_first: bool) -> None:
    program = (
        "from manus_jax.agentgym.environments import embedded_server\n"
        "from manus_jax.servers.processes import ServerSupervisor\n"
        "import time\n"
        "supervisor = ServerSupervisor([embedded_server('maze')])\n"
        "supervisor.start()\n"
        "print(supervisor.pids()[0], flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert running(pid)
    if stopped_first:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not running(pid))
