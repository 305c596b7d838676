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
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import IO, Any

from manus_jax.agentgym.client import StepResult
from manus_jax.rollout.endpoint.environment import EnvironmentPlay

_TAIL_BYTES = 1 << 16


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
    if isinstance(command, str) or not command or not all(isinstance(w, str) for w in command):
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

    The command and its children are killed at the end of the block.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**os.environ, **task.variables()},
                start_new_session=True,
            )
        except OSError as error:  # it was removed, or its variables are too long
            failed: Future[Any] = Future()
            failed.set_exception(ProgramError(f"{command[0]} cannot be started: {error.strerror}"))
            yield failed
            return

        def wait() -> str:
            code = process.wait()
            if code:
                last = _tail(errors).strip().rpartition("\n")[2] or "no message"
                raise ProgramError(f"exit code {code}: {last[:500]}")
            return _tail(output)

        ended = _in_thread(wait)
        try:
            yield ended
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")


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
