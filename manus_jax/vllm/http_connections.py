"""HTTP connections to one server, whose requests in flight can be aborted from another thread.

A request to a hanging server would otherwise block its worker thread, and the exit of the program,
until its timeout.
"""

import contextlib
import http.client
import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

from manus_jax.servers.bounded_http import exchange, readable, request_head


class Connections:
    """Thread-safe; connections are kept open and reused. Proxies are not used."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._parts = urlsplit(url)
        self._headers = {**headers, "Content-Type": "application/json"}
        self._head = b""
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._closed = False

    def request(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        connect_seconds: float,
        seconds: float,
        max_bytes: int,
    ) -> tuple[int, bytes]:
        """The status and content of the response; raises as `bounded_http.exchange` does.

        `seconds` is the time for the request and the whole response, once connected.
        """
        content = None if body is None else json.dumps(body).encode()
        connection = self._take() or self._connect(connect_seconds)
        try:
            answer = exchange(
                connection,
                method,
                self._parts.path + path,
                self._head,
                content,
                seconds,
                max_bytes,
            )
        except BaseException:
            self._put_back(connection, reusable=False)
            raise
        self._put_back(connection, reusable=connection.sock is not None)
        return answer

    def break_off(self) -> None:
        """Makes requests in flight fail with OSError or BadResponse; later ones reconnect."""
        with self._lock:
            busy = list(self._busy)
        for connection in busy:
            sock = connection.sock
            if sock is not None:
                with contextlib.suppress(OSError):  # it was closed in the meantime
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Aborts requests in flight; later ones fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self.break_off()

    def _take(self) -> http.client.HTTPConnection | None:
        """An idle connection that the server has not closed."""
        with self._lock:
            while self._idle and not self._closed:
                connection = self._idle.pop()
                if not readable(connection.sock):
                    self._busy.add(connection)
                    return connection
                connection.close()
        return None

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=seconds)
        try:
            self._head = request_head(self._parts.netloc, self._headers)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except ValueError as error:  # a host name or a key that cannot be encoded
            raise OSError(str(error)) from None
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise OSError("the connections are closed")

    def _put_back(self, connection: http.client.HTTPConnection, reusable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if reusable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()
