"""Many processes, one program: how they find each other, talk, notice a death, and end together.

The one idea: process 0 leads. It plays the episodes and decides what is done next; the others wait
for its commands and do their part, so that every process runs the same programs in the same order.
Commands go through the key-value store of JAX's coordination service, never over the devices: no
device waits while episodes are played. Beside it, a thread of every process shows that it is alive
and looks after the others; when one is gone, all end, with a line that says which.
"""

import contextlib
import glob
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

import jax

# The coordination service and its client have no public name.
from jax._src import distributed as jax_distributed

from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import DistributedSettings
from manus_jax.errors import Stopped
from manus_jax.learner.learner import Together
from manus_jax.training.stopping import Preempted

Command = dict[str, Any]
_COMMANDS, _TEAM, _LEAVING = "manus/command/", "manus/team/", "manus/leaving/"
_ALIVE, _FAREWELL = f"{_TEAM}alive/", f"{_TEAM}farewell/"
_POLL_S = 1.0
# Far more than any process can be behind: most commands end only when all have taken part.
_KEPT_COMMANDS = 100


def alone(**command: Any) -> contextlib.AbstractContextManager[None]:
    """What `Team.together` is to a single process: there is nobody to tell."""
    return contextlib.nullcontext()


class Heartbeats:
    """Which processes have been silent for too long; knows no clock of its own."""

    def __init__(self, members: Iterable[int], limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._heard = {member: ("", now) for member in members}

    def silent(self, beats: Mapping[int, str], now: float) -> list[int]:
        """Those whose beat has not changed for the limit; `beats` is what each shows now."""
        for member, beat in beats.items():
            if self._heard[member][0] != beat:
                self._heard[member] = (beat, now)
        return [m for m, (_, since) in self._heard.items() if now - since > self._limit_s]


class Team:
    """The processes of a job, seen from one of them."""

    def __init__(self, settings: DistributedSettings) -> None:
        self._client: Any = jax_distributed.global_state.client
        self._keeps_store = jax_distributed.global_state.service is not None
        self._heartbeat_s, self._together_s = settings.heartbeat_s, settings.together_s
        self._period_s = min(_POLL_S, settings.heartbeat_s / 5)
        self.index, self.count = jax.process_index(), jax.process_count()
        self._numbers = itertools.count()
        self._busy: tuple[str, float, float] | None = None  # a command, its limit and its deadline
        self._left = threading.Event()
        self._last_words = _LastWords(
            f"error: process {self.index} of {self.count} was killed, or ended because process 0 "
            "was; the same command goes on from the last checkpoint"
        )
        self._say_hello()
        self._watcher = threading.Thread(target=self._watch, name="team", daemon=True)
        self._watcher.start()

    @property
    def leads(self) -> bool:
        return self.index == 0

    @contextlib.contextmanager
    def together(self, **command: Any) -> Iterator[None]:
        """Process 0 says what it does in the block; all others do it as soon as they hear it.

        The block is to end when it is done, not begun: what it takes is held against the limit,
        `times` of it where the command says so.
        """
        number = next(self._numbers)
        self._begin(command)
        self._client.key_value_set(f"{_COMMANDS}{number}", json.dumps(command))
        if number >= _KEPT_COMMANDS:
            self._client.key_value_delete(f"{_COMMANDS}{number - _KEPT_COMMANDS}")
        yield
        self._busy = None

    def commands(self) -> Iterator[Command]:
        """What process 0 says, one after the other; a command is done when the next is asked for.

        Ends by none of its own: "stop" is a command.
        """
        for number in self._numbers:
            command = self._wait_for(f"{_COMMANDS}{number}")
            self._begin(command)
            yield command
            self._busy = None

    def _begin(self, command: Command) -> None:
        limit_s = self._together_s * command.get("times", 1)
        self._busy = (command["do"], limit_s, time.monotonic() + limit_s)

    def _wait_for(self, key: str) -> Command:
        # In short waits, between which Python sees to signals.
        while True:
            try:
                return json.loads(self._client.blocking_key_value_get(key, int(_POLL_S * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def _say_hello(self) -> None:
        """Shows this process, and waits until all others are shown."""
        self._client.key_value_set(f"{_ALIVE}{self.index}", f"{socket.gethostname()} 0")
        self._client.wait_at_barrier("manus/hello", int(self._together_s * 1000))

    def _watch(self) -> None:
        heartbeats = Heartbeats(range(self.count), self._heartbeat_s, time.monotonic())
        host = socket.gethostname()
        answered = time.monotonic()
        for beat in itertools.count(1):
            if self._left.wait(self._period_s):
                return
            try:
                self._client.key_value_set(
                    f"{_ALIVE}{self.index}", f"{host} {beat}", allow_overwrite=True
                )
                shown = dict(self._client.key_value_dir_get(_TEAM))
            except jax.errors.JaxRuntimeError:
                if time.monotonic() - answered > self._heartbeat_s and not self._left.is_set():
                    self._end(1, f"process 0 cannot be reached for {self._heartbeat_s:g} s")
                continue
            answered = time.monotonic()
            self._look_at(shown, heartbeats)

    def _look_at(self, shown: Mapping[str, str], heartbeats: Heartbeats) -> None:
        """Ends this process if another has ended, or this one's command takes too long."""
        for key, text in shown.items():
            if key.startswith(_FAREWELL) and not self._left.is_set():
                number, farewell = key.removeprefix(_FAREWELL), json.loads(text)
                if int(number) != self.index:
                    self._end(farewell["code"], f"process {number}: {farewell['said']}", told=True)
        beats = {
            int(key.removeprefix(_ALIVE)): text
            for key, text in shown.items()
            if key.startswith(_ALIVE)
        }
        silent = heartbeats.silent(beats, time.monotonic())
        if silent and not self._left.is_set():
            who = ", ".join(f"{m} ({beats[m].split()[0]})" for m in silent)
            self._end(
                1,
                f"process {who} of {self.count} has not been heard of for {self._heartbeat_s:g} s, "
                "so the job ends; the same command goes on from the last checkpoint",
                dead=silent,
            )
        busy = self._busy
        if busy is not None and time.monotonic() > busy[2]:
            self._end(
                1,
                f"{busy[0]!r} has taken more than {busy[1]:g} s on this process: others did not "
                "take part, a disk or network hangs, or distributed.together_s is too short",
            )

    def fail(self, error: BaseException, expected: tuple[type[BaseException], ...]) -> NoReturn:
        """Ends the job because of an error in this process, on all others as well.

        Of an error of the runtime the reason may be that another process is gone; then that one is
        to be named, so the watcher gets its time to find out.
        """
        if isinstance(error, expected):
            self._end(2, " ".join(str(error).split()))
        if isinstance(error, SystemExit):
            self._end(int(error.code or 0), "asked to stop before its first step")
        if isinstance(error, KeyboardInterrupt):
            self._end(130, "interrupted; the same command goes on from the last checkpoint")
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(self._heartbeat_s + 3 * _POLL_S)
        traceback.print_exception(error)
        self._end(1, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _end(
        self, code: int, said: str, told: bool = False, dead: Collection[int] = ()
    ) -> NoReturn:
        """Ends this process, and the others unless they are `told` already."""
        self._left.set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not told:
                text = json.dumps({"code": code, "said": said})
                self._client.key_value_set(f"{_FAREWELL}{self.index}", text, allow_overwrite=True)
            self._client.key_value_set(f"{_LEAVING}{self.index}", "", allow_overwrite=True)
            if self._keeps_store:
                self._see_off(set(range(self.count)) - {self.index, *dead})
        self._last_words.unsaid()
        print(f"error: {said}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)

    def _see_off(self, others: set[int]) -> None:
        """The process with the store leaves last: JAX aborts whoever finds it gone."""
        deadline = time.monotonic() + self._heartbeat_s
        while others and time.monotonic() < deadline:
            time.sleep(self._period_s / 2)
            shown = self._client.key_value_dir_get(_LEAVING)
            others -= {int(key.removeprefix(_LEAVING)) for key, _ in shown}
        time.sleep(self._period_s)

    def part(self) -> None:
        """All processes end in good order, together."""
        self._client.wait_at_barrier("manus/part", int(self._together_s * 1000))
        self._left.set()
        self._watcher.join()
        self._last_words.unsaid()
        jax.distributed.shutdown()


class _LastWords:
    """A line on stderr if this process dies without having said anything.

    `kill -9` leaves no time, and JAX's coordination client aborts a process whose process 0 is gone
    at once, with pages of its own. So a shell waits at a pipe.
    """

    def __init__(self, line: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", 'read _ || echo "$0" >&2', line],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # the signals of this process's group are not its own
        )

    def unsaid(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is gone, or was told before
            self._shell.communicate(b"\n")


def cluster_found(environment: Mapping[str, str], tpu: bool) -> str | None:
    """What says that this process is one of several, or None.

    `tpu` is whether this machine has TPU chips: a pod tells its hosts apart by itself.
    """
    several = lambda name: int(environment.get(name) or 1) > 1
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
    """Joins this process to the others, before JAX is used; False where there are none."""
    given = (settings.coordinator, settings.processes, settings.process_id)
    found = cluster_found(os.environ, _has_tpu())
    wanted = settings.mode == "on" or any(value is not None for value in given) or found
    if settings.mode == "off" or not wanted:
        return False
    # How processes on CPU exchange data; no other platform reads it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its service swallows SIGTERM from the start; the training loop asks for it when it can act.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            settings.coordinator,
            _given(settings.processes, "JAX_NUM_PROCESSES"),
            _given(settings.process_id, "JAX_PROCESS_ID"),
            initialization_timeout=int(settings.connect_s),
            # JAX's own watch is the second one: it ends a process without a clear word.
            heartbeat_timeout_seconds=int(2 * settings.heartbeat_s + 10),
            shutdown_timeout_seconds=int(settings.heartbeat_s + 10),
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"distributed: this process cannot join the others ({found or 'as set'}): "
            f"{' '.join(str(error).split())[:300]}. Set distributed.coordinator = 'host:port', "
            "distributed.processes and distributed.process_id, or distributed.mode = 'off'"
        ) from None
    return jax.process_count() > 1


def _given(setting: int | None, variable: str) -> int | None:
    """A setting, or what the environment says; None leaves it to JAX."""
    if setting is None and variable in os.environ:
        return int(os.environ[variable])
    return setting


@contextlib.contextmanager
def joined(
    settings: DistributedSettings, expected: tuple[type[BaseException], ...]
) -> Iterator[Team | None]:
    """This process as one of its job's, as long as the block; None where it is alone.

    What leaves the block as an exception ends all processes: one of the `expected` with exit code
    2, another with 1, a `Stopped`, which all have heard of, with its own.
    """
    if not connect(settings):
        yield None
        return
    team = Team(settings)
    signal.signal(signal.SIGTERM, _stop_at_once)
    try:
        yield team
    except Stopped:
        team.part()
        raise
    except BaseException as error:  # whatever it is, the others must not wait for this process
        team.fail(error, expected)
    else:
        team.part()


def _stop_at_once(number: int, _: FrameType | None) -> NoReturn:
    """Of SIGTERM before the training loop, which sees to it later: nothing is there to save."""
    sys.exit(128 + number)


@contextlib.contextmanager
def dismissed_at_the_end(together: Together) -> Iterator[None]:
    """Process 0's last command comes at the end of the block: all is done, or the run stops."""
    try:
        yield
    except Stopped as stopped:
        with together(do="stop", said=str(stopped), code=stopped.code):
            raise
    with together(do="stop", said="", code=0):
        pass


class Preemption:
    """Whether a host is wanted back, asked by all processes after the same steps.

    `reached(step)` is Orbax's preemption point. JAX takes note of SIGTERM from the first call on,
    which is before the first step, and brings all processes to the same step.
    """

    def __init__(self, reached: Preempted) -> None:
        self._reached = reached
        self._noting = False

    def __call__(self, step: int) -> bool:
        if not self._noting:
            jax.config.update("jax_enable_preemption_service", True)
            jax_distributed.global_state.initialize_preemption_sync_manager()
            self._noting = True
        return self._reached(step)
