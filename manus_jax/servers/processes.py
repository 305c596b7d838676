"""Server processes started by this program: supervised, restarted and stopped.

One supervisor thread owns every process from start to end. The kernel watches that thread on behalf
of the servers (`launch.py`), so they cannot outlive the program. A server announces its address on
its output with a line "serving URL" or "serving NAME at URL". A server that dies is restarted after
a back-off; one that keeps dying is given up.
"""

import contextlib
import functools
import http.client
import itertools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from manus_jax.errors import UserError
from manus_jax.servers.health import BackOff

_log = logging.getLogger(__name__)
_ANNOUNCEMENT = re.compile(r"serving (?:.+ at )?(https?://\S+)")
_POLL = 0.1
_TAIL_LINES = 20
_MAX_LINE = 1 << 16  # characters; a longer line is read in parts


class ServerSetupError(UserError, RuntimeError):
    """Servers cannot be used or started; nothing was started, or all of it was stopped."""


def answers(url: str, timeout: float = 5.0) -> bool:
    """Whether GET `url` returns status 200 in time. Proxies are not used."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def free_ports(count: int) -> list[int]:
    """Distinct ports of the loopback interface that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


@dataclass(frozen=True)
class SupervisorSettings:
    """Limits in seconds; the restart count of a server that ran for `stable_after` is reset."""

    startup_timeout: float = 60.0
    stop_timeout: float = 5.0
    max_restarts: int = 5
    stable_after: float = 300.0
    back_off: BackOff = field(default_factory=BackOff)


@dataclass(frozen=True)
class ServerCommand:
    """A server that runs as `python -m MODULE ARGUMENTS…`; messages call it `name`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = None  # None: that of this process
    prefix: str = ""  # a path in the announced address that is not part of the server's root
    log: Path | None = None  # all output; that of a restarted server goes to NAME-2.log, …
    parent_death_signal: int = signal.SIGKILL
    python: str = sys.executable


class ServerProcess:
    """One server process. `url` is set once it serves; `tail` holds its last lines of output."""

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self.started_at = time.monotonic()
        self.url: str | None = None
        self._log = None if command.log is None else _unused(command.log)
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        launcher = [command.python, "-m", "manus_jax.servers.launch", str(os.getpid())]
        launcher += [str(int(command.parent_death_signal)), command.module]
        self._process = subprocess.Popen(
            [*launcher, *command.arguments],
            env=None if command.environment is None else dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # In its own group, Ctrl-C does not reach the server, and the processes that it starts
            # (Java, vLLM's workers) can be ended with it.
            start_new_session=True,
        )
        name = f"{command.name} output"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while the process runs."""
        return self._process.poll()

    @property
    def tail(self) -> str:
        return "\n".join(self._lines)

    def kill(self) -> None:
        """Kills the whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def terminate(self) -> None:
        """Asks the server to end; it ends its own children."""
        self._process.terminate()

    def wait(self, timeout: float) -> None:
        """Waits for the end of the process and its output; kills the group when time is up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()
        self._process.wait()
        self._reader.join(timeout=1.0)

    def describe_output(self) -> str:
        """What the process wrote last, and where the rest is."""
        log = self._log
        written = self.tail if log is None else f"{self.tail[-300:]}\n(all output: {log})"
        return f"it wrote:\n{written}"

    def _read(self) -> None:
        # Reading continues after the announcement, and when the log cannot be written: a server
        # whose pipe is full would hang.
        assert self._process.stdout is not None
        log: TextIO | None = None
        try:
            log = self._log.open("w", buffering=1) if self._log is not None else None
        except OSError as error:
            self._warn_not_logged(error)
        for line in iter(functools.partial(self._process.stdout.readline, _MAX_LINE), ""):
            self._lines.append(line.rstrip())
            announcement = _ANNOUNCEMENT.match(line)
            if announcement and self.url is None:
                self.url = announcement[1].rstrip("/").removesuffix(self.command.prefix)
            try:
                if log is not None:
                    log.write(line)
            except OSError as error:
                self._warn_not_logged(error)
                log = None
        with contextlib.suppress(OSError):
            if log is not None:
                log.close()

    def _warn_not_logged(self, error: OSError) -> None:
        _log.warning("the output of %s is not logged any more: %s", self.command.name, error)


def _unused(log: Path) -> Path:
    """The file itself or, if it exists, one with a number."""
    numbered = (log.with_stem(f"{log.stem}-{n}") for n in itertools.count(2))
    return next(path for path in itertools.chain([log], numbered) if not path.exists())


@dataclass
class ServerSlot:
    """One supervised server and the process that currently runs it."""

    command: ServerCommand
    process: ServerProcess | None = None
    url: str | None = None  # the address announced last
    restarts: int = 0
    restart_at: float = 0.0
    given_up: bool = False


class ServerSupervisor:
    """Keeps a server running for each command, from `start` until `stop`.

    `on_serving(name, url, old url or None)` is called when a server has come up, and
    `on_given_up(name, url, reason)` when one will not come back, both from the supervisor's thread.
    """

    def __init__(
        self,
        commands: Sequence[ServerCommand],
        settings: SupervisorSettings | None = None,
        *,
        on_serving: Callable[[str, str, str | None], None] | None = None,
        on_given_up: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._settings = settings or SupervisorSettings()
        self.on_serving = on_serving
        self.on_given_up = on_given_up
        self.failures = 0  # servers that died or did not come up, restarted or not
        self._slots = [ServerSlot(command) for command in commands]
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._error: ServerSetupError | OSError | None = None
        self._thread = threading.Thread(target=self._run, name="servers", daemon=True)

    def start(self) -> list[str]:
        """Starts all servers at once; their URLs, in order, when every one of them serves.

        Raises ServerSetupError with the server's output if one does not come up; then none runs.
        """
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        return [slot.url for slot in self._slots if slot.url is not None]

    def pids(self) -> list[int]:
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    def replace(self, name: str, url: str) -> None:
        """Kills a server that stopped answering; it is restarted like one that died."""
        for slot in self._slots:
            process = slot.process
            if slot.command.name == name and process is not None and process.url == url:
                _log.warning("%s at %s no longer answers and is restarted", name, url)
                process.kill()

    def stop(self) -> None:
        """Ends all servers."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._start_all()
        except (ServerSetupError, OSError) as error:
            self._error = error
        self._started.set()
        if self._error is None:
            while not self._stopping.wait(_POLL):
                for slot in self._slots:
                    self._watch(slot, time.monotonic())
        self._stop_all()

    def _start_all(self) -> None:
        for slot in self._slots:
            slot.process = ServerProcess(slot.command)
        while any(slot.url is None for slot in self._slots) and not self._stopping.wait(_POLL):
            for slot in self._slots:
                problem = self._startup_problem(slot.process) if slot.url is None else None
                if problem:
                    raise ServerSetupError(f"the {slot.command.name} server {problem}")
                self._announce(slot)
        if self._stopping.is_set():
            raise ServerSetupError("stopped while the servers were starting")

    def _startup_problem(self, process: ServerProcess | None) -> str | None:
        """Why a process that does not serve yet never will; None while it still may."""
        assert process is not None
        if process.exit_status is not None:
            self.failures += 1
            process.wait(self._settings.stop_timeout)
            return f"ended with status {process.exit_status}; {process.describe_output()}"
        if time.monotonic() - process.started_at > self._settings.startup_timeout:
            self.failures += 1
            process.kill()
            process.wait(self._settings.stop_timeout)
            limit = self._settings.startup_timeout
            return f"did not serve within {limit:g} s; {process.describe_output()}"
        return None

    def _watch(self, slot: ServerSlot, now: float) -> None:
        """Restarts a server that died; announces one that came back."""
        if slot.given_up:
            return
        if slot.process is None:
            if now >= slot.restart_at:
                slot.process = ServerProcess(slot.command)
            return
        self._announce(slot)
        is_up = slot.process.url is not None and slot.process.exit_status is None
        problem = None if is_up else self._startup_problem(slot.process)
        if problem:
            self._plan_restart(slot, problem, now)

    def _announce(self, slot: ServerSlot) -> None:
        """Passes on the address of a server that has come up since the last check."""
        url = slot.process.url if slot.process else None
        if url is not None and url != slot.url:
            old, slot.url = slot.url, url
            if old is not None:
                _log.warning("%s is back at %s", slot.command.name, url)
            if self.on_serving:
                self.on_serving(slot.command.name, url, old)

    def _plan_restart(self, slot: ServerSlot, problem: str, now: float) -> None:
        assert slot.process is not None
        if now - slot.process.started_at > self._settings.stable_after:
            slot.restarts = 0
        slot.process = None
        slot.restarts += 1
        _log.warning("the %s server at %s %s", slot.command.name, slot.url, problem)
        if slot.restarts > self._settings.max_restarts:
            slot.given_up = True
            if self.on_given_up:
                reason = f"given up after {self._settings.max_restarts} restarts; it {problem}"
                self.on_given_up(slot.command.name, slot.url or "", reason)
            return
        # No jitter: start-up times already spread out servers that died together.
        slot.restart_at = now + self._settings.back_off.seconds(slot.restarts, 0.0)

    def _stop_all(self) -> None:
        processes = [slot.process for slot in self._slots if slot.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + self._settings.stop_timeout
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
