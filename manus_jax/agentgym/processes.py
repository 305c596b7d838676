"""Environment servers that the program starts itself: on free ports, watched, restarted, ended.

The one idea: one supervisor thread owns every process from start to end. It is also the thread
whose death the kernel watches on behalf of the servers (see `launch.py`), so they cannot outlive
the program. A server that dies comes back at a new address, which the pool is told; one that keeps
dying is given up, with the last lines it wrote.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from envs.registry import ENVIRONMENTS as EMBEDDED
from manus_jax.agentgym.client import server_root
from manus_jax.agentgym.failures import EnvironmentSetupError
from manus_jax.agentgym.health import BackOff
from manus_jax.agentgym.table import environment

_log = logging.getLogger(__name__)
_ANNOUNCEMENT = re.compile(r"serving (\S+) at (\S+)")
_POLL = 0.1
_TAIL_LINES = 20


@dataclass(frozen=True)
class ProcessSettings:
    """Patience with server processes. A server that lived `stable_after` seconds starts afresh."""

    startup_timeout: float = 60.0
    stop_timeout: float = 5.0
    max_restarts: int = 5
    stable_after: float = 300.0
    back_off: BackOff = field(default_factory=BackOff)


class ServerProcess:
    """One server process: `url` is set once it serves, `tail` is what it wrote last."""

    def __init__(self, env: str, port: int = 0) -> None:
        self.env = env
        self.started_at = time.monotonic()
        self.url: str | None = None
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        parent = str(os.getpid())
        launcher = [sys.executable, "-m", "manus_jax.agentgym.launch", parent, "envs.serve"]
        self._process = subprocess.Popen(
            [*launcher, EMBEDDED.get(env, env), "--port", str(port), "--parent_pid", parent],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A group of its own: Ctrl-C reaches the program, which then ends its servers in order,
            # and with the group end the processes that a server has started (Java).
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"{env} output", daemon=True)
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
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def wait(self, timeout: float) -> None:
        """Waits for the end of the process and of its output; kills it when the time is up."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._reader.join(timeout=1.0)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        # Reading on after the announcement keeps the pipe from filling up.
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip())
            announcement = _ANNOUNCEMENT.match(line)
            if announcement and self.url is None:
                self.url = server_root(environment(self.env), announcement[2])


@dataclass
class _Slot:
    """The place of one server, through all the processes that fill it."""

    env: str
    process: ServerProcess | None = None
    url: str | None = None  # as the pool knows it
    restarts: int = 0
    restart_at: float = 0.0
    given_up: bool = False


class ServerSupervisor:
    """Keeps `count` servers of each environment running, from `start` until `stop`.

    `on_serving(env, url, old url or None)` is called when a server has come up, `on_given_up(env,
    url, reason)` when one will not come back; both from the supervisor's thread.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        settings: ProcessSettings | None = None,
        *,
        on_serving: Callable[[str, str, str | None], None] | None = None,
        on_given_up: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._settings = settings or ProcessSettings()
        self.on_serving = on_serving
        self.on_given_up = on_given_up
        self._slots = [_Slot(env) for env, count in counts.items() for _ in range(count)]
        self._begun = threading.Event()
        self._ending = threading.Event()
        self._error: EnvironmentSetupError | None = None
        self._thread = threading.Thread(target=self._run, name="environment servers", daemon=True)

    def start(self) -> dict[str, list[str]]:
        """Starts all servers at once, and returns their URLs when every one of them serves.

        EnvironmentSetupError, with what the server wrote, if one does not come up; then none runs.
        """
        self._thread.start()
        self._begun.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        urls: dict[str, list[str]] = {}
        for slot in self._slots:
            assert slot.url is not None
            urls.setdefault(slot.env, []).append(slot.url)
        return urls

    def pids(self) -> list[int]:
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    def replace(self, env: str, url: str) -> None:
        """Kills a server that no longer answers; it is restarted like one that died by itself."""
        for slot in self._slots:
            process = slot.process
            if slot.env == env and process is not None and process.url == url:
                _log.warning("%s at %s does not answer any more and is restarted", env, url)
                process.kill()

    def stop(self) -> None:
        """Ends all servers."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._start_all()
        except EnvironmentSetupError as error:
            self._error = error
        self._begun.set()
        if self._error is None:
            while not self._ending.wait(_POLL):
                for slot in self._slots:
                    self._watch(slot, time.monotonic())
        self._stop_all()

    def _start_all(self) -> None:
        for slot in self._slots:
            slot.process = ServerProcess(slot.env)
        while any(slot.url is None for slot in self._slots) and not self._ending.wait(_POLL):
            for slot in self._slots:
                trouble = self._trouble_starting(slot.process) if slot.url is None else None
                if trouble:
                    raise EnvironmentSetupError(f"the {slot.env} server {trouble}")
                self._announce(slot)
        if self._ending.is_set():
            raise EnvironmentSetupError("stopped while the servers were starting")

    def _trouble_starting(self, process: ServerProcess | None) -> str | None:
        """Why a process that does not serve yet will not do so; None while it still may."""
        assert process is not None
        if process.exit_status is not None:
            process.wait(self._settings.stop_timeout)
            return f"ended with status {process.exit_status}; it wrote:\n{process.tail}"
        if time.monotonic() - process.started_at > self._settings.startup_timeout:
            process.kill()
            process.wait(self._settings.stop_timeout)
            limit = self._settings.startup_timeout
            return f"did not serve within {limit:g} s; it wrote:\n{process.tail}"
        return None

    def _watch(self, slot: _Slot, now: float) -> None:
        """One look at one server: restart it if it died, announce it if it came back."""
        if slot.given_up:
            return
        if slot.process is None:
            if now >= slot.restart_at:
                slot.process = ServerProcess(slot.env)
            return
        self._announce(slot)
        is_up = slot.process.url is not None and slot.process.exit_status is None
        trouble = None if is_up else self._trouble_starting(slot.process)
        if trouble:
            self._plan_restart(slot, trouble, now)

    def _announce(self, slot: _Slot) -> None:
        """Passes on the address of a server that has come up since the last look."""
        url = slot.process.url if slot.process else None
        if url is not None and url != slot.url:
            old, slot.url = slot.url, url
            if old is not None:
                _log.warning("%s is back at %s", slot.env, url)
            if self.on_serving:
                self.on_serving(slot.env, url, old)

    def _plan_restart(self, slot: _Slot, trouble: str, now: float) -> None:
        assert slot.process is not None
        if now - slot.process.started_at > self._settings.stable_after:
            slot.restarts = 0
        slot.process = None
        slot.restarts += 1
        _log.warning("the %s server at %s %s", slot.env, slot.url, trouble)
        if slot.restarts > self._settings.max_restarts:
            slot.given_up = True
            if self.on_given_up:
                reason = f"given up after {self._settings.max_restarts} restarts; it {trouble}"
                self.on_given_up(slot.env, slot.url or "", reason)
            return
        # All servers of one program may die together; what spreads them out is their own start.
        slot.restart_at = now + self._settings.back_off.seconds(slot.restarts, 0.0)

    def _stop_all(self) -> None:
        processes = [slot.process for slot in self._slots if slot.process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(self._settings.stop_timeout)
