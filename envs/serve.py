"""`python -m envs.serve NAME --port P`: serve an environment over AgentGym's protocol.

The server listens on loopback by default and prints its URL on stdout as soon as it accepts
connections. It exits on SIGTERM and, with `--parent_pid`, when that process ends for any reason.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import uvicorn

from envs.registry import UnknownEnvironment, load
from envs.server import build_app

PARENT_CHECK_SECONDS = 0.5


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
        self.should_exit = True


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
    parser = argparse.ArgumentParser(prog="python -m envs.serve", description=__doc__)
    parser.add_argument("name", help="the environment, e.g. textcraft, or my_env:SPEC")
    parser.add_argument("--port", type=int, required=True, help="0 selects a free port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--max_sessions", type=int, help="limit on live sessions")
    parser.add_argument(
        "--session_ttl", type=float, default=3600.0, help="seconds until an unused session is freed"
    )
    parser.add_argument("--parent_pid", type=int, help="exit when this process ends")
    parser.add_argument("--log_level", default="warning", choices=["info", "warning", "error"])
    options = parser.parse_args(arguments)
    if options.max_sessions is not None and options.max_sessions < 1:
        _fail(f"--max_sessions must be at least 1, not {options.max_sessions}")
    if options.session_ttl <= 0:
        _fail(f"--session_ttl must be more than 0 seconds, not {options.session_ttl}")
    if not 0 <= options.port <= 65535:
        _fail(f"--port must be between 0 and 65535, not {options.port}")

    try:
        spec = load(options.name)
    except UnknownEnvironment as error:
        _fail(str(error))
    missing = spec.requirements()
    if missing is not None:
        _fail(missing)
    try:
        bound = listen(options.host, options.port)
    except OSError as error:
        _fail(
            f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; "
            "choose another --port (0 selects a free one)"
        )

    app = build_app(spec, options.max_sessions, options.session_ttl)
    config = uvicorn.Config(
        app,
        log_level=options.log_level,
        access_log=options.log_level == "info",
        timeout_graceful_shutdown=2,
        backlog=2048,
    )
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{bound.getsockname()[1]}{spec.prefix}"
    # After shutting down, uvicorn raises the signal again; that is a normal exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    _Server(config, f"serving {spec.name} at {url}", options.parent_pid).run(sockets=[bound])


def _exit(*_: Any) -> NoReturn:
    sys.exit(0)


def _fail(message: str) -> NoReturn:
    print(f"envs.serve: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
