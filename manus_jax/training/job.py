"""The processes of a training job: how they connect, share results and shut down.

Every process runs the same program. Process 0 additionally runs the rollouts. `from_primary` sends
its results to the other processes with one host barrier followed by a broadcast, so no device waits
while episodes are played. Errors on process 0 are sent in the same way. When a process dies,
JAX's coordination service ends the others after `distributed.heartbeat_s` with a message that names
it.
"""

import contextlib
import glob
import importlib.util
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import DistributedSettings
from manus_jax.data_proto import DataProto
from manus_jax.errors import Stopped, exit_code, report_error
from manus_jax.learner.processes import barrier
from manus_jax.status import STATUS

T = TypeVar("T")
_EXIT_BARRIER_S = 20.0
_PIECE = 1 << 26  # bytes of a message that are sent at a time
_FAILURE = "failure of process 0"  # a key of meta_info that no batch uses


class Job:
    """This process, number `index` of `count`; the default is a single process."""

    def __init__(self, index: int = 0, count: int = 1, timeout_s: float = 7200.0) -> None:
        self.index, self.count = index, count
        self._timeout_s = timeout_s
        self._preemption_checks = 0

    @property
    def primary(self) -> bool:
        return self.index == 0

    @property
    def number(self) -> int | None:
        """The index, for messages; None for a single process."""
        return self.index if self.count > 1 else None

    def from_primary(self, make: Callable[[], DataProto]) -> DataProto:
        """Process 0 calls `make`; every process returns its result, or raises its error."""
        if self.count == 1:
            return make()
        if not self.primary:
            return self._receive()
        try:
            result = make()
        except BaseException as error:
            text = " ".join(str(error).split()) or type(error).__name__
            failure = {_FAILURE: (f"process 0: {text[:1000]}", exit_code(error))}
            self._broadcast(DataProto.empty(failure).to_bytes())
            raise
        self._broadcast(result.to_bytes())
        return result

    def on_primary(self, run: Callable[[], T]) -> T | None:
        """Process 0 calls `run` while the others wait; returns its result there, None elsewhere."""
        results: list[T] = []

        def make() -> DataProto:
            results.append(run())
            return DataProto.empty()

        self.from_primary(make)
        return results[0] if results else None

    def await_primary(self) -> None:
        """Returns when process 0 has called this too."""
        self.on_primary(lambda: None)

    def preempted(self) -> bool:
        """Whether the job must stop because one of its hosts received SIGTERM.

        All processes call this at the same points of the program and get the same result.
        """
        self._preemption_checks += 1
        return multihost.reached_preemption(self._preemption_checks)

    def _receive(self) -> DataProto:
        with STATUS.waiting():
            message = DataProto.from_bytes(self._broadcast(b""))
        if _FAILURE in message.meta_info:
            text, code = message.meta_info[_FAILURE]
            raise Stopped(f"error: {text}", code)
        return message

    def _broadcast(self, data: bytes) -> bytes:
        """Process 0's bytes on every process."""
        try:
            barrier(self._timeout_s)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise Stopped(
                f"error: process {self.index} waited {self._timeout_s:g} s "
                f"(distributed.timeout_s) for the others: {' '.join(str(error).split())[:500]}",
                1,
            ) from None
        # JAX has no integers of 64 bits by default.
        high, low = multihost_utils.broadcast_one_to_all(np.array(divmod(len(data), 2**31)))
        size = int(high) * 2**31 + int(low)
        # A broadcast passes through the memory of the devices, which need not hold a whole batch.
        return b"".join(
            _broadcast_piece(data[start : start + _PIECE], min(_PIECE, size - start))
            for start in range(0, size, _PIECE)
        )


def _broadcast_piece(data: bytes, size: int) -> bytes:
    # Sizes are rounded up to powers of two, so that few broadcasts are compiled.
    buffer = np.zeros(1 << max(10, (size - 1).bit_length()), np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(buffer))[:size].tobytes()


@contextlib.contextmanager
def joined(settings: DistributedSettings) -> Iterator[Job]:
    """Connects this process to its job for the duration of the block.

    An exception ends all processes: those that raise it exit together, and JAX's coordination
    service ends the others.
    """
    if not connect(settings):
        yield Job()
        return
    job = Job(jax.process_index(), jax.process_count(), settings.timeout_s)
    # JAX shares a SIGTERM with all processes; Ctrl-C on any host is handled in the same way.
    signal.signal(signal.SIGINT, _as_sigterm)
    try:
        yield job
        barrier(settings.timeout_s)
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            # Another process probably died; JAX detects which one in this time, and exits here.
            time.sleep(settings.heartbeat_s + 5)
        _exit_together(error)
        raise
    jax.distributed.shutdown()


def _exit_together(error: BaseException) -> None:
    """Returns if all processes are about to exit; otherwise exits at once, so others detect it."""
    try:
        # A barrier of its own: a process that has not failed may be waiting at the next one.
        barrier(_EXIT_BARRIER_S, "exit")
    except jax.errors.JaxRuntimeError:
        code = report_error(error)
        sys.stdout.flush()
        os._exit(code)
    jax.distributed.shutdown()


def _as_sigterm(number: int, _: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def cluster_found(environment: Mapping[str, str], tpu: bool) -> str | None:
    """The name of the evidence that this process is one of several, or None.

    `tpu` is whether this machine has TPU chips, whose runtime knows the hosts of its pod.
    """
    several = lambda name: _number(environment, name) not in (None, 1)
    if environment.get("JAX_COORDINATOR_ADDRESS"):
        return "JAX_COORDINATOR_ADDRESS"
    if several("SLURM_NTASKS") and "SLURM_STEP_NODELIST" in environment:
        return "SLURM_NTASKS"
    if several("OMPI_COMM_WORLD_SIZE"):
        return "OMPI_COMM_WORLD_SIZE"
    if tpu and "tpu" in (environment.get("JAX_PLATFORMS") or "tpu"):
        return "TPU"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "JOB_COMPLETION_INDEX"
    return None


def _has_tpu() -> bool:
    chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def connect(settings: DistributedSettings) -> bool:
    """Connects this process to the others, before JAX is used; False if there are none."""
    given = (settings.coordinator, settings.processes, settings.process_id)
    found = cluster_found(os.environ, _has_tpu())
    wanted = settings.mode == "on" or any(value is not None for value in given) or found
    if settings.mode == "off" or not wanted:
        return False
    coordinator = settings.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if coordinator:
        _check_address(coordinator)
    # The collectives between CPU processes; other platforms ignore this option.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            _given(settings.processes, "JAX_NUM_PROCESSES"),
            _given(settings.process_id, "JAX_PROCESS_ID"),
            initialization_timeout=int(settings.connect_s),
            heartbeat_timeout_seconds=int(settings.heartbeat_s),
            shutdown_timeout_seconds=int(settings.heartbeat_s),
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"distributed: this process cannot join the others ({found or 'as set'}): "
            f"{' '.join(str(error).split())[:300]}. Set distributed.coordinator = 'host:port', "
            "distributed.processes and distributed.process_id, or distributed.mode = 'off'"
        ) from None
    return jax.process_count() > 1


def _check_address(coordinator: str) -> None:
    """Raises ConfigError for a host without an address, for which JAX would end the process."""
    host, _, port = coordinator.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"distributed.coordinator = {coordinator!r}: {getattr(error, 'strerror', '') or error}"
        ) from None


def _given(setting: int | None, variable: str) -> int | None:
    """The setting, or the environment variable; None lets JAX decide."""
    return setting if setting is not None else _number(os.environ, variable)


def _number(environment: Mapping[str, str], variable: str) -> int | None:
    """The number in an environment variable; None if it is not set."""
    text = environment.get(variable)
    if text and not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the environment variable {variable} = {text!r} is not a number")
    return int(text) if text else None
