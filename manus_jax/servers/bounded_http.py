"""HTTP responses within a total time and a total size.

The timeout of a socket starts again with every byte that arrives. A server that sends its response
byte by byte would hold a caller for as long as it likes, and an endless response would fill the
memory, so both are limited for the response as a whole, headers included.
"""

import contextlib
import http.client
import io
import json
import select
import socket
import time
from typing import Any

import numpy as np

_MAX_NESTING = 500
_NESTING = np.zeros(256, np.int8)
_NESTING[list(b"[{")], _NESTING[list(b"]}")] = 1, -1


class BadResponse(Exception):
    """The response is too large or malformed; the message is the end of a sentence."""


class TooLarge(BadResponse):
    """The response exceeds its size limit."""


def limit_response(connection: http.client.HTTPConnection, seconds: float, max_bytes: int) -> None:
    """Limits the next request and response on an open connection, from now on.

    Reading the response raises TimeoutError or TooLarge.
    """
    deadline = time.monotonic() + seconds

    def response(sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
        reader: Any = _BoundedReader(sock, deadline, max_bytes)
        return http.client.HTTPResponse(reader, *args, **options)

    connection.response_class = response  # type: ignore[assignment]
    connection.sock.settimeout(seconds)


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    seconds: float,
    max_bytes: int,
) -> tuple[int, bytes]:
    """Sends a request on an open connection; returns the status and content of the response.

    Raises BadResponse, TimeoutError after `seconds` in total, or ConnectionError if the connection
    is lost; it must then be closed. It is closed already if the server does not keep it open.
    """
    limit_response(connection, seconds, max_bytes)
    try:
        connection.request(method, path, body, headers)
        with contextlib.closing(connection.getresponse()) as answer:
            # With a size, a length that the server makes up is not allocated in advance.
            content = answer.read(max_bytes)
            if answer.length:
                raise http.client.IncompleteRead(content, answer.length)
    except ConnectionError:
        raise
    except http.client.IncompleteRead:
        raise ConnectionError("the response is incomplete") from None
    except (OverflowError, MemoryError):
        raise BadResponse("declares an impossible length") from None
    except (http.client.HTTPException, ValueError) as error:
        raise BadResponse(f"is not valid HTTP ({type(error).__name__})") from None
    if answer.will_close:
        connection.close()
    return answer.status, content


def readable(sock: socket.socket) -> bool:
    """Whether the server closed an idle connection, or sent more than the last response.

    A surplus response would be taken for the response to the next request.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def parse_json(content: bytes) -> Any:
    """The JSON value; BadResponse if it is malformed or nested too deeply.

    Python's parser recurses on the C stack, which is small in some threads.
    """
    steps = _NESTING[np.frombuffer(content, np.uint8)]
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > _MAX_NESTING:
        raise BadResponse(f"is nested more than {_MAX_NESTING} levels deep")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise BadResponse("is not valid JSON") from None


class _BoundedReader(io.RawIOBase):
    """Reads one response from a socket; `makefile` is what http.client asks a socket for."""

    def __init__(self, sock: socket.socket, deadline: float, max_bytes: int) -> None:
        self._sock, self._deadline, self._max_bytes = sock, deadline, max_bytes
        self._left = max_bytes
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._sock.settimeout(seconds)
        count = self._raw.readinto(buffer)
        self._left -= count or 0
        if self._left < 0:
            raise TooLarge(f"is larger than {self._max_bytes >> 20} MiB")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
