"""Runs a user's agent: a Python function in a thread, or a command in a process of its own.

Both are given the address and the key of their episode. A process is killed when its episode ends;
a thread cannot be, but everything that it asks of the endpoint or the environment is then refused.
"""

import asyncio
import dataclasses
import importlib
import inspect
import json
import os
import selectors
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import IO, Any

from manus_jax.agentgym.client import StepResult
from manus_jax.rollout.endpoint.environment import EnvironmentPlay

_TAIL_BYTES = 1 << 16
_POLL_SECONDS = 0.1
_LAST_READS = 64  # more than a pipe holds


class ProgramError(Exception):
    """A command ended with an error."""


@dataclasses.dataclass(frozen=True)
class ProgramTask:
    """What a program is given: its task, and where its model and its environment are."""

    base_url: str
    api_key: str
    environment_url: str
    env: str
    item: int
    item_id: str
    prompt: tuple[dict[str, str], ...]
    ground_truth: Any
    extra: Mapping[str, Any]
    environment: EnvironmentPlay = dataclasses.field(repr=False)

    def reset(self) -> str:
        """Starts the task in the environment; returns the first observation."""
        return self.environment.reset()

    def step(self, action: str) -> StepResult:
        """Plays an action; the result has `observation`, `reward` and `done`."""
        return self.environment.step(action)

    def variables(self) -> dict[str, str]:
        """What a command finds in its environment variables."""
        described = {
            "env": self.env,
            "item": self.item,
            "item_id": self.item_id,
            "prompt": self.prompt,
            "ground_truth": self.ground_truth,
            "extra": self.extra,
        }
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "MANUS_JAX_ENVIRONMENT_URL": self.environment_url,
            "MANUS_JAX_TASK": json.dumps(described, default=str),
        }


Program = Callable[[ProgramTask], Any]


def load_function(location: str) -> Program:
    """The function "module:name"; ValueError in one line if there is none."""
    module, _, name = location.partition(":")
    if not module or not name:
        raise ValueError(f"function = {location!r} must have the form 'module:function'")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # whatever the module raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"function = {location!r} cannot be imported: {reason}") from error
    if not callable(function):
        raise ValueError(f"function = {location!r}: the module has no function {name!r}")
    return function


def check_command(command: Sequence[str]) -> None:
    """Raises ValueError for a command that cannot be started."""
    if isinstance(command, str) or not command:
        raise ValueError(f"command = {command!r} must be a list of words: ['python', 'agent.py']")
    if shutil.which(command[0]) is None:
        raise ValueError(f"command = {list(command)!r}: there is no program {command[0]!r}")


@contextmanager
def running_function(function: Program, task: ProgramTask) -> Iterator["Future[Any]"]:
    """Calls the function in a thread; the future has its result."""

    def call() -> Any:
        made = function(task)
        return asyncio.run(_awaited(made)) if inspect.isawaitable(made) else made

    yield _in_thread(call)


async def _awaited(made: Any) -> Any:
    return await made


@contextmanager
def running_command(command: Sequence[str], task: ProgramTask) -> Iterator["Future[Any]"]:
    """Runs the command; the future has what it printed, or a ProgramError.

    The command and its children are killed at the end of the block. Only the end of their output is
    kept, however much they print.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **task.variables()},
            start_new_session=True,
        )
    except OSError as error:  # it was removed, or its variables are too long
        failed: Future[Any] = Future()
        failed.set_exception(ProgramError(f"{command[0]} cannot be started: {error.strerror}"))
        yield failed
        return
    output, errors = _Tail(process.stdout), _Tail(process.stderr)

    def wait() -> str:
        code = _read_to_the_end(process, output, errors)
        if code:
            last = errors.text().strip().rpartition("\n")[2] or "no message"
            raise ProgramError(f"exit code {code}: {last[:500]}")
        return output.text()

    ended = _in_thread(wait)
    try:
        yield ended
    finally:
        _kill(process)
        process.wait()


class _Tail:
    """The last bytes of what a command prints to a pipe."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self.pipe = pipe
        self._kept = b""

    def read(self) -> bool:
        """Reads once, which may block; False at the end of the pipe."""
        piece = os.read(self.pipe.fileno(), _TAIL_BYTES)
        self._kept = (self._kept + piece)[-_TAIL_BYTES:]
        return bool(piece)

    def text(self) -> str:
        return self._kept.decode(errors="replace")


def _read_to_the_end(process: "subprocess.Popen[bytes]", *tails: _Tail) -> int:
    """Reads what the command prints until it ends, and returns its exit code.

    Children in a session of their own may keep the pipes open, or go on printing: the reader waits
    neither for the end of the pipes nor for what they print later.
    """
    with selectors.DefaultSelector() as pipes:
        for tail in tails:
            pipes.register(tail.pipe, selectors.EVENT_READ, tail)

        def read(seconds: float) -> bool:
            ready = pipes.select(seconds)
            for key, _ in ready:
                if not key.data.read():
                    pipes.unregister(key.fileobj)
            return bool(ready)

        while pipes.get_map() and process.poll() is None:
            read(_POLL_SECONDS)
        code = process.wait()
        _kill(process)
        for _ in range(_LAST_READS):
            if not pipes.get_map() or not read(0):
                break
    for tail in tails:
        tail.pipe.close()
    return code


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kills a command and those of its children that have not left its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _in_thread(call: Callable[[], Any]) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # including SystemExit: the episode waits for the outcome
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="program", daemon=True).start()
    return future


def reward_of(result: Any) -> float | None:
    """The reward in a program's result; None if it has none.

    A number, {"reward": number}, or a text whose last line is one of these as JSON.
    """
    if isinstance(result, str):
        try:
            result = json.loads(result.strip().rpartition("\n")[2])
        except (ValueError, RecursionError):
            return None
    if isinstance(result, Mapping):
        result = result.get("reward")
    if isinstance(result, bool) or result is None:
        return None
    try:
        return float(result)
    except (TypeError, ValueError, OverflowError):
        return None
