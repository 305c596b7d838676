"""Whether a session still belongs to the server process that created it.

After a restart AgentGym's servers number their sessions from 0 again and report no version, so an
episode that kept its id would continue in another episode's game. An incarnation is one life of a
server process. It is observed through a connection of its own: a request every few seconds keeps
the server from closing it, so that it ends when the process ends, which the operating system
reports even between two requests. A server that closes every connection is only seen to restart if
it refuses a connection or a call in the meantime.
"""

import re
import select
import socket
import ssl
import threading
from urllib.parse import urlsplit

from manus_jax.agentgym.connection import Connection
from manus_jax.agentgym.table import EnvironmentRow
from manus_jax.config.server_settings import EnvPoolSettings

PING_SECONDS = 2.0
"""uvicorn and hypercorn close connections that were idle for 5 s."""

_KNOCK_SECONDS = 0.5
_READS_PER_PING = 64
_HANG_UP = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere POLLHUP is reported in any case
_CLOSES = re.compile(rb"^HTTP/1\.0|^connection:\s*close", re.IGNORECASE | re.MULTILINE)
_GATEWAY_ERROR = re.compile(rb"^HTTP/1\.\d 50[234]", re.MULTILINE)


class ServerIncarnation:
    """One life of one server process. Safe to use from many threads.

    `ids` are the session ids that must not be returned again by `create`; their owner is the
    `LeaseGroup`, under its lock.
    """

    def __init__(self, row: EnvironmentRow, root: str, settings: EnvPoolSettings) -> None:
        """Connects to the server; EnvironmentFailure if it is not there."""
        self.ids: set[int | str] = set()
        self._connection = Connection(row, root, settings)
        http = self._connection.connected("GET", "/")
        http.sock.setblocking(False)
        self._socket = http.sock
        self._poll = select.poll()
        self._poll.register(self._socket, _HANG_UP)
        parts = urlsplit(root)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._address = (parts.hostname or "", port)
        headers = {"Host": parts.netloc, **self._connection.headers}
        lines = [f"GET {parts.path}/ HTTP/1.1", *(f"{key}: {headers[key]}" for key in headers)]
        self._request = "\r\n".join([*lines, "", ""]).encode()
        self._lock = threading.Lock()
        self._observed = True
        self._ended = False
        self.ping()

    @property
    def observed(self) -> bool:
        """Whether the server keeps the connection open; else its end has to be inferred."""
        return self._observed

    def ended(self) -> bool:
        with self._lock:
            if not self._ended and self._observed and self._poll.poll(0):
                self._read()
            return self._ended

    def end(self) -> None:
        """Invalidates all sessions, because the server is known to have restarted."""
        with self._lock:
            self._finish()

    def ping(self) -> None:
        """Keeps the connection in use; if the server keeps none, checks that it still listens."""
        if not self._observed:
            self._knock()
        with self._lock:
            if self._ended or not self._observed:
                return
            self._read()
            if self._observed and not self._ended:
                try:
                    self._socket.send(self._request)
                except (BlockingIOError, ssl.SSLWantWriteError):
                    pass  # the server has stopped reading
                except OSError:
                    self._finish()

    def _knock(self) -> None:
        try:
            socket.create_connection(self._address, _KNOCK_SECONDS).close()
        except ConnectionRefusedError:
            self.end()
        except OSError:
            pass  # a busy server may not accept in time

    def _read(self) -> None:
        """Consumes the responses so far; notices the end of the connection and of the server."""
        for _ in range(_READS_PER_PING):
            try:
                received = self._socket.recv(1 << 16)
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            except OSError:
                received = b""
            if _CLOSES.search(received):
                # It closes every connection, which says nothing about the process.
                self._observed = False
                self._connection.close()
                return
            if not received or _GATEWAY_ERROR.search(received):
                self._finish()
                return

    def _finish(self) -> None:
        self._ended = True
        self._connection.close()
