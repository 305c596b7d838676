"""`python -m envs.serve NAME --port P`: serve an environment over AgentGym's protocol.

The server listens on loopback by default and prints its URL on stdout as soon as it accepts
connections. It exits on SIGTERM and, with `--parent_pid`, when that process ends for any reason. If
MANUS_JAX_ENV_KEY or `--api_key_file` contains a key, requests need it in the header
`Authorization: Bearer KEY`.
"""

import argparse
import asyncio
import ipaddress
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from envs.bounded_connection import BoundedConnection
from envs.command import CommandParser
from envs.registry import UnknownEnvironment, load
from envs.server import MAX_SESSIONS_PER_CLIENT, build_app

KEY_VARIABLE = "MANUS_JAX_ENV_KEY"
PARENT_CHECK_SECONDS = 0.5
STOP_SECONDS = 5.0
"""The process exits this long after SIGTERM, even if a game does not return from a step."""
MOST_SESSIONS = 1_000_000


class _Server(uvicorn.Server):
    """Prints its announcement once it accepts connections, and can exit with a parent process."""

    def __init__(self, config: uvicorn.Config, announcement: str, parent_pid: int | None) -> None:
        super().__init__(config)
        self._announcement = announcement
        self._parent_pid = parent_pid
        self._watcher: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, flush=True)
        if self._parent_pid is not None:
            self._watcher = asyncio.create_task(self._exit_with(self._parent_pid))

    async def _exit_with(self, pid: int) -> None:
        while process_lives(pid):
            await asyncio.sleep(PARENT_CHECK_SECONDS)
        _exit_within(STOP_SECONDS)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        _exit_within(STOP_SECONDS)
        super().handle_exit(sig, frame)


def _exit_within(seconds: float) -> None:
    # A thread that plays a step cannot be stopped, and Python would wait for it at exit.
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()


def process_lives(pid: int) -> bool:
    """Whether the process is running; a zombie is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not os.path.isdir("/proc/self")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 selects a free one. OSError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)  # at once, so that a second server on the same port fails here
    except OSError:
        bound.close()
        raise
    return bound


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandParser(prog="python -m envs.serve", description=__doc__)
    parser.add_argument("name", help="the environment, e.g. textcraft, or my_env:SPEC")
    parser.add_argument(
        "--port", type=int, required=True, help="the port to listen on; 0 selects a free one"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument("--api_key_file", type=Path, help=f"a file with the key; or {KEY_VARIABLE}")
    parser.add_argument("--max_sessions", type=int, help="the most live sessions")
    parser.add_argument(
        "--max_sessions_per_client",
        type=int,
        default=MAX_SESSIONS_PER_CLIENT,
        help="the most live sessions of one client address",
    )
    parser.add_argument(
        "--session_ttl", type=float, default=3600.0, help="seconds until an unused session is freed"
    )
    parser.add_argument("--parent_pid", type=int, help="exit when this process ends")
    parser.add_argument("--log_level", default="warning", choices=["info", "warning", "error"])
    options = parser.parse_args(arguments)
    _check(options, parser)
    key = _api_key(options.api_key_file, parser)
    try:
        spec = load(options.name)
    except UnknownEnvironment as error:
        parser.fail(str(error))
    missing = spec.requirements()
    if missing is not None:
        parser.fail(missing)
    try:
        bound = listen(options.host, options.port)
    except (OSError, UnicodeError, TypeError) as error:
        unknown = isinstance(error, socket.gaierror | UnicodeError | TypeError)
        hint = "--host" if unknown else "--port (0 selects a free one)"
        parser.fail(
            f"cannot listen on {options.host}:{options.port}: "
            f"{getattr(error, 'strerror', None) or error}; choose another {hint}"
        )
    address = bound.getsockname()
    if key is None and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        print(
            f"envs.serve: warning: {options.host} can be reached from the network and there is no "
            f"API key; set {KEY_VARIABLE} or --api_key_file",
            file=sys.stderr,
        )

    app = build_app(
        spec,
        options.max_sessions,
        options.session_ttl,
        max_sessions_per_client=options.max_sessions_per_client,
        api_key=key,
    )
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        log_level=options.log_level,
        access_log=options.log_level == "info",
        timeout_graceful_shutdown=2,
        backlog=2048,
    )
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{address[1]}{spec.prefix}"
    # After shutting down, uvicorn raises the signal again; that is a normal exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    _Server(config, f"serving {spec.name} at {url}", options.parent_pid).run(sockets=[bound])


def _check(options: argparse.Namespace, parser: CommandParser) -> None:
    for name in ("max_sessions", "max_sessions_per_client"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= MOST_SESSIONS:
            parser.fail(f"--{name} must be between 1 and {MOST_SESSIONS}, not {value}")
    if not (math.isfinite(options.session_ttl) and options.session_ttl > 0):
        parser.fail(f"--session_ttl must be more than 0 seconds, not {options.session_ttl}")
    if not 0 <= options.port <= 65535:
        parser.fail(f"--port must be between 0 and 65535, not {options.port}")
    if not options.host:
        parser.fail("--host must be an address or a name; 0.0.0.0 listens on all interfaces")
    pid = options.parent_pid
    if pid is not None and not (0 < pid < 2**31 and process_lives(pid)):
        parser.fail(f"--parent_pid must be the id of a running process, not {pid}")


def _api_key(file: Path | None, parser: CommandParser) -> str | None:
    """The key in the file or in the environment; None if neither is given."""
    try:
        if file is not None and file.exists() and not file.is_file():  # a pipe may never end
            parser.fail(f"--api_key_file {file} is not a file")
        key = os.environ.get(KEY_VARIABLE, "") if file is None else file.read_text().strip()
    except (OSError, ValueError) as error:
        parser.fail(f"--api_key_file {file} cannot be read: {error}")
    if not (key.isascii() and key.isprintable() and " " not in key):
        parser.fail(f"{file or KEY_VARIABLE} must contain a key of printable ASCII characters")
    if file is not None and not key:
        parser.fail(f"--api_key_file {file} is empty")
    return key or None


def _exit(*_: Any) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    main()
