"""Real servers for the environment tests: as a process of its own, or in a thread of this one."""

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from fastapi import FastAPI

from envs.serve import listen


class Client:
    """One keep-alive connection to a server; paths are relative to its base URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.url = url
        self._prefix = parts.path
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)

    def send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        self._connection.request(method, self._prefix + path, body)
        response = self._connection.getresponse()
        return response.status, response.read()

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        status, text = self.send("POST", path, None if body is None else json.dumps(body).encode())
        return status, json.loads(text) if text[:1] in b'{["tf-0123456789' else text.decode()

    def get(self, path: str) -> tuple[int, Any]:
        status, text = self.send("GET", path)
        return status, json.loads(text) if text[:1] in b'{["tf-0123456789' else text.decode()

    def ok(self, path: str, body: Any = None) -> Any:
        """The answer to a POST that has to succeed in the sense of HTTP."""
        status, answer = self.post(path, body)
        assert status == 200, (path, status, answer)
        return answer


@pytest.fixture(scope="session")
def served() -> Iterator[Callable[[str], str]]:
    """name → base URL of `python -m envs.serve name`, one process per name for the whole run."""
    processes: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def start(name: str) -> str:
        if name not in processes:
            command = [sys.executable, "-m", "envs.serve", name, "--port", "0"]
            command += ["--parent_pid", str(os.getpid())]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"serving {name} at http://127.0.0.1:"), line
            processes[name] = process, line.split(" at ")[1].strip()
        return processes[name][1]

    yield start
    for process, _ in processes.values():
        process.terminate()
        process.wait(timeout=30)


class AppServer:
    """Serves applications from threads of this process."""

    def __init__(self) -> None:
        self._running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def __call__(self, app: FastAPI) -> str:
        """Start serving; the base URL."""
        ready = threading.Event()

        class Announcing(uvicorn.Server):
            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                ready.set()

        bound = listen("127.0.0.1", 0)
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        server = Announcing(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        assert ready.wait(timeout=30)
        self._running.append((server, thread))
        return f"http://127.0.0.1:{bound.getsockname()[1]}"

    def stop(self) -> None:
        for server, thread in self._running:
            server.should_exit = True
            thread.join(timeout=30)
        self._running.clear()


@pytest.fixture
def serve_app() -> Iterator[AppServer]:
    """Application → base URL, served until the end of the test."""
    server = AppServer()
    yield server
    server.stop()
