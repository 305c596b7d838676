"""HTTP responses within a total time and a total size.

The timeout of a socket starts again with every byte that arrives. A server that sends its response
byte by byte would hold a caller for as long as it likes, and an endless response would fill the
memory, so both are limited for the response as a whole, headers included.
"""

import contextlib
import dataclasses
import http.client
import io
import json
import re
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from manus_jax.run_slots import SLOTS

_FIRST_READ = 1 << 16
_STATUS_LINE = re.compile(r"HTTP/1\.1 ((?!204|304)[2-5]\d\d)(?: .*)?")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f]")
_MAX_NESTING = 500
_NESTING = np.zeros(256, np.int8)
_NESTING[list(b"[{")], _NESTING[list(b"]}")] = 1, -1


class BadResponse(Exception):
    """The response is too large or malformed; the message is the end of a sentence."""


class TooLarge(BadResponse):
    """The response exceeds its size limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]  # names in lower case
    content: bytes
    reusable: bool  # whether the connection can take another request


def request_head(host: str, headers: Mapping[str, str]) -> bytes:
    """The header lines of every request to a host; ValueError if they cannot be sent."""
    name = host.encode("ascii" if host.isascii() else "idna").decode()
    lines = {"Host": name, "Accept-Encoding": "identity", **headers}
    if any(_UNSAFE.search(text) for text in lines.values()):
        raise ValueError("a header has a character that HTTP does not allow")
    return "".join(f"{key}: {value}\r\n" for key, value in lines.items()).encode("latin-1")


def send_request(
    sock: socket.socket,
    method: str,
    path: str,
    head: bytes,
    body: bytes | None,
    seconds: float,
    max_bytes: int,
) -> HttpResponse:
    """Sends a request on an open connection and reads the response.

    Raises TimeoutError after `seconds` in total, TooLarge, OSError if the connection is lost, and
    the errors of http.client, which also reads what is not a plain response with a length. The
    connection must then be closed.
    """
    if _UNSAFE.search(path) or " " in path:
        raise http.client.InvalidURL(f"the path {path!r} has a character that HTTP does not allow")
    deadline = time.monotonic() + seconds
    start = f"{method} {path} HTTP/1.1\r\n".encode("ascii")
    length = b"Content-Length: %d\r\n" % len(body or b"") if body or method == "POST" else b""
    if sock.gettimeout() != seconds:
        sock.settimeout(seconds)
    sock.sendall(b"".join((start, head, length, b"\r\n", body or b"")))
    left = deadline - time.monotonic()
    if left < 0.99 * seconds:  # the request was not sent at once
        sock.settimeout(max(1e-3, left))
    SLOTS.leave()
    received = sock.recv(_FIRST_READ)
    plain = _plain_response(received, max_bytes)
    if plain is None:
        return _any_response(_BoundedReader(sock, deadline, max_bytes, received), method, max_bytes)
    status, headers, content, length_left = plain
    if length_left > 0:
        reader = io.BufferedReader(_BoundedReader(sock, deadline, max_bytes))
        rest = reader.read(length_left)
        if len(rest) < length_left:
            raise http.client.IncompleteRead(content + rest, length_left - len(rest))
        content += rest
    reusable = length_left >= 0 and "close" not in headers.get("connection", "").lower()
    return HttpResponse(status, headers, content, reusable)


def _plain_response(
    received: bytes, max_bytes: int
) -> tuple[int, dict[str, str], bytes, int] | None:
    """(status, headers, content so far, bytes that are missing); None: http.client must read it.

    http.client takes 0.2 ms for the header lines of a response, which is most of the cost of a
    step in a fast environment.
    """
    head, found, content = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    match = _STATUS_LINE.fullmatch(first)
    if not found or match is None:
        return None
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.isascii() or not name.replace("-", "").isalnum():
            return None
        headers[name.lower()] = value.strip()
    length = headers.get("content-length", "")
    if (
        len(headers) < len(lines)
        or "transfer-encoding" in headers
        or not (length.isascii() and length.isdigit())
        or len(received) + int(length[:20]) > max_bytes
    ):
        return None
    return int(match[1]), headers, content[: int(length)], int(length) - len(content)


def _any_response(reader: "_BoundedReader", method: str, max_bytes: int) -> HttpResponse:
    stream: Any = reader
    with contextlib.closing(http.client.HTTPResponse(stream, method=method)) as answer:
        answer.begin()
        # With a size, a length that the server makes up is not allocated in advance.
        content = answer.read(max_bytes)
        if answer.length:
            raise http.client.IncompleteRead(content, answer.length)
    headers = {key.lower(): value for key, value in answer.headers.items()}
    return HttpResponse(answer.status, headers, content, not answer.will_close)


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    head: bytes,
    body: bytes | None,
    seconds: float,
    max_bytes: int,
) -> tuple[int, bytes]:
    """Sends a request on an open connection; returns the status and content of the response.

    Raises BadResponse, TimeoutError after `seconds` in total, or ConnectionError if the connection
    is lost; it must then be closed. It is closed already if the server does not keep it open.
    """
    try:
        answer = send_request(connection.sock, method, path, head, body, seconds, max_bytes)
    except ConnectionError:
        raise
    except http.client.IncompleteRead:
        raise ConnectionError("the response is incomplete") from None
    except (OverflowError, MemoryError):
        raise BadResponse("declares an impossible length") from None
    except (http.client.HTTPException, ValueError) as error:
        raise BadResponse(f"is not valid HTTP ({type(error).__name__})") from None
    if not answer.reusable:
        connection.close()
    return answer.status, answer.content


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

    def __init__(
        self, sock: socket.socket, deadline: float, max_bytes: int, received: bytes | None = None
    ) -> None:
        """`received` was read before; b"" if that was the end."""
        self._sock, self._deadline, self._max_bytes = sock, deadline, max_bytes
        self._received = received
        self._left = max_bytes

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._received is None:
            seconds = self._deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            self._sock.settimeout(seconds)
            count = self._sock.recv_into(buffer)
        else:
            count = min(len(buffer), len(self._received))
            buffer[:count] = self._received[:count]
            # After the end of the connection, every further read returns nothing.
            self._received = self._received[count:] or (None if count else b"")
        self._left -= count
        if self._left < 0:
            raise TooLarge(f"is larger than {self._max_bytes >> 20} MiB")
        return count
