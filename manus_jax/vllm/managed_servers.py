"""vLLM servers that the program starts itself, watches, starts again and ends.

One thread owns them, and the kernel ends them when it ends. A server that dies comes back at its
old address from the newest snapshot; the pool then finds it there with old weights, and brings it
to the current ones like any other.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from manus_jax.engines.protocol import EngineError
from manus_jax.vllm.access import KEY_VARIABLE
from manus_jax.vllm.client import ServerFailure, VllmServer

_POLL = 0.2
_STOP_SECONDS = 20.0
_MAX_RESTARTS = 5


@dataclasses.dataclass(frozen=True)
class ServerRecipe:
    """How a server is started. `model` is given to `manus_jax.serve`, `more` to vLLM."""

    python: str | None
    model: Path
    max_length: int
    slots: int
    dtype: str
    more: Sequence[str] = ()


@dataclasses.dataclass(eq=False)
class _Place:
    """The address and the GPUs of one server, through all the processes that fill it."""

    port: int
    gpus: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class ManagedServers:
    """Servers on free ports of this machine, one for each group of `gpus`; what they print goes to
    files in `logs`. An empty group leaves its server what this process sees.

    Returns when all of them answer. EngineError, with the last line that was written, if one ends
    before that, or takes longer than `start_seconds`.
    """

    def __init__(
        self,
        recipe: ServerRecipe,
        gpus: Sequence[tuple[str, ...]],
        logs: Path,
        start_seconds: float = 900.0,
    ) -> None:
        self._recipe = recipe
        self._start_seconds = start_seconds
        logs.mkdir(parents=True, exist_ok=True)
        self._places = [
            _Place(port, group, logs / f"vllm-{port}.log")
            for port, group in zip(_free_ports(len(gpus)), gpus, strict=True)
        ]
        self._ending = threading.Event()
        self._started = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-servers", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            self.close()
            raise EngineError(self._problem)

    @property
    def urls(self) -> list[str]:
        return [place.url for place in self._places]

    @property
    def pids(self) -> list[int]:
        return [place.process.pid for place in self._places if place.process is not None]

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for place in self._places:
                self._start(place)
            self._await_all()
            self._started.set()
            while self._problem is None and not self._ending.wait(_POLL):
                for place in self._places:
                    self._watch(place)
        except OSError as error:
            self._problem = f"vLLM cannot be started: {error}"
        finally:
            self._started.set()
            self._stop_all()

    def _start(self, place: _Place) -> None:
        recipe = self._recipe
        command = [sys.executable, "-m", "manus_jax.serve", "--model", str(recipe.model)]
        command += ["--port", str(place.port), "--max-length", str(recipe.max_length)]
        command += ["--slots", str(recipe.slots), "--dtype", recipe.dtype]
        command += ["--parent-pid", str(os.getpid())]
        if recipe.python is not None:
            command += ["--python", recipe.python]
        if place.gpus:
            command += ["--gpus", ",".join(place.gpus)]
        # On loopback, with nobody but this program to ask it anything, a server needs no key.
        environment = {k: v for k, v in os.environ.items() if k != KEY_VARIABLE}
        if not place.gpus:
            # vLLM would bind every server's threads to the same cores. Each gets its share, but for
            # one core, as vLLM leaves one to the process that schedules.
            cores = len(os.sched_getaffinity(0)) // len(self._places)
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores - 1)))
        with place.log.open("ab") as log:
            place.process = subprocess.Popen(
                [*command, "--", *recipe.more],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # with its group end the workers that it starts
            )

    def _await_all(self) -> None:
        deadline = time.monotonic() + self._start_seconds
        for place in self._places:
            while not answers(place.url) and not self._ending.wait(_POLL):
                assert place.process is not None
                status = place.process.poll()
                if status is not None:
                    self._problem = f"a vLLM server ended with status {status}: {_last(place.log)}"
                elif time.monotonic() > deadline:
                    self._problem = (
                        f"a vLLM server did not answer in {self._start_seconds:g} s; "
                        f"see {place.log}"
                    )
                if self._problem is not None:
                    return

    def _watch(self, place: _Place) -> None:
        if place.process is None or place.process.poll() is None:
            return
        _end_group(place.process.pid, signal.SIGKILL)
        place.process = None
        if place.restarts < _MAX_RESTARTS:
            place.restarts += 1
            self._start(place)

    def _stop_all(self) -> None:
        processes = [place.process for place in self._places if place.process is not None]
        for process in processes:
            process.terminate()  # which ends its server itself
        deadline = time.monotonic() + _STOP_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _end_group(process.pid, signal.SIGKILL)
            process.wait()


def _end_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def answers(url: str) -> bool:
    """Whether a server there says that it is well."""
    server = VllmServer(url)
    try:
        server.check_health()
    except ServerFailure:
        return False
    finally:
        server.close()
    return True


def _last(log: Path) -> str:
    """The last line that says something, with where the others are."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line]
    return f"{said[-1][:300] if said else 'it wrote nothing'} (all of it in {log})"


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]
