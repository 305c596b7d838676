"""An HTTP session whose requests in flight can be aborted from another thread.

A request to a hanging server would otherwise block its worker thread, and the exit of the program,
until its timeout.
"""

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool


class BreakableSession:
    """An HTTP session; thread-safe, without proxies."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[HTTPConnection] = weakref.WeakSet()
        self._closed = False
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers.update(headers)
        adapter = HTTPAdapter(pool_connections=1, pool_maxsize=512)
        adapter.poolmanager.pool_classes_by_scheme = {
            "http": _tracked(HTTPConnectionPool, self._register),
            "https": _tracked(HTTPSConnectionPool, self._register),
        }
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    def request(
        self, method: str, url: str, body: Any, timeout: tuple[float, float]
    ) -> requests.Response:
        """`timeout`: seconds to connect, and to wait for the answer."""
        return self._session.request(method, url, json=body, timeout=timeout)

    def break_off(self) -> None:
        """Makes requests in flight fail with requests.ConnectionError; later ones reconnect."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            sock = connection.sock
            if sock is not None:
                with contextlib.suppress(OSError):  # it was closed in the meantime
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Aborts requests in flight; later ones fail."""
        with self._lock:
            self._closed = True
        self.break_off()
        self._session.close()

    def _register(self, connection: HTTPConnection) -> None:
        with self._lock:
            if self._closed:
                raise OSError("the session is closed")
            self._open.add(connection)


def _tracked(pool: type[HTTPConnectionPool], register: Callable[[Any], None]) -> Any:
    """urllib3's connection pool class, with connections that register themselves."""
    base: Any = pool.ConnectionCls

    class Connection(base):
        def connect(self) -> None:
            super().connect()
            register(self)

    return type("Pool", (pool,), {"ConnectionCls": Connection})
