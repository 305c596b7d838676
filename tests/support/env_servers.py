"""Real servers for the environment tests, and a small client that looks at nothing but HTTP."""

import contextlib
import http.client
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from envs.bounded_connection import BoundedConnection
from envs.serve import listen


class Client:
    """One keep-alive connection to a server; paths are relative to its base URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.url = url
        self._prefix = parts.path
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)

    def send(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Underscores in the names of headers stand for hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, self._prefix + path, body, named)
        response = self._connection.getresponse()
        return response.status, response.read()

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        status, text = self.send("POST", path, None if body is None else json.dumps(body).encode())
        return status, json.loads(text) if text[:1] in b'{["tf-0123456789' else text.decode()

    def start(self, path: str, body: Any) -> None:
        """Sends a POST without waiting for the answer."""
        self._connection.request("POST", self._prefix + path, json.dumps(body).encode())

    def get(self, path: str) -> tuple[int, Any]:
        status, text = self.send("GET", path)
        return status, json.loads(text) if text[:1] in b'{["tf-0123456789' else text.decode()

    def ok(self, path: str, body: Any = None) -> Any:
        """The answer to a POST that has to succeed in the sense of HTTP."""
        status, answer = self.post(path, body)
        assert status == 200, (path, status, answer)
        return answer


def seen(answer: Any) -> str:
    """The observation in whatever shape an environment answers a reset, a step or a look."""
    if isinstance(answer, dict):
        return answer["observation"] if "observation" in answer else answer["state"]
    return answer[0] if isinstance(answer, list) else answer


def listening_addresses(pid: int) -> set[str]:
    """The IP addresses on which a process listens, from /proc."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # 0A: LISTEN
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, packed))
    return found


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
        config = uvicorn.Config(
            app, http=BoundedConnection, log_level="critical", timeout_graceful_shutdown=1
        )
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
