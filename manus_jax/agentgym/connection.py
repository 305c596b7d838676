"""HTTP calls to one environment server; every failure is an `EnvironmentFailure`.

A response is bounded in time and size. The time for which a call holds the interpreter lock bounds
the number of concurrent episodes, so calls use sockets and `send_request` instead of a library.
"""

import http.client
import json
import math
import os
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind, shortened
from manus_jax.agentgym.table import EnvironmentRow
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.run_slots import SLOTS
from manus_jax.servers.bounded_http import TooLarge, readable, request_head, send_request
from manus_jax.servers.processes import ServerSetupError

# uvicorn closes a connection that was idle for 5 s. A request sent at that moment would be lost,
# and a step must not be sent twice, so idle connections are closed here first.
_IDLE_LIMIT = 2.0
_CHECK_TIMEOUT = 5.0

MAX_RESPONSE = 16 << 20
"""Bytes; observations take kilobytes."""

_MAX_NESTING = 100
# One that is not closed ends with the text: tried again from every quote, it would take forever.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
KEY_VARIABLE = "MANUS_JAX_ENV_KEY"
"""The environment variable with the key that servers may require."""

_JSON = {"Content-Type": "application/json"}


def server_root(row: EnvironmentRow, address: str) -> str:
    """The URL of a server, given a URL with or without its prefix, or a host.

    A bare host gets the environment's default port. 0.0.0.0 is an address to listen on, not one to
    call, and becomes 127.0.0.1.
    """
    bare_host = "://" not in address
    parts = urlsplit(f"http://{address}" if bare_host else address)
    try:
        port = parts.port
    except ValueError:
        port = 0
    extra = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or extra:
        raise ValueError(f"{row.name}: {address!r} is not a server; write http://HOST:PORT")
    host = "127.0.0.1" if parts.hostname == "0.0.0.0" else parts.hostname
    if ":" in host:
        host = f"[{host}]"
    if port is None and bare_host:
        port = row.port
    path = parts.path.rstrip("/").removesuffix(row.prefix)
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{path}"


@dataclass(frozen=True)
class Response:
    status: int
    content: bytes
    own_items: bool = False  # the server has the items of `envs/`

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", errors="replace")

    @property
    def is_page(self) -> bool:
        """Whether this is a web page, which no AgentGym server returns.

        webarena's server (Quart) labels its plain "ok" as text/html, so the content type is not
        used, and reports exceptions as pages, so a 500 does not count.
        """
        return self.status != 500 and self.content.lstrip()[:1] == b"<"


class Connection:
    """One HTTP connection to one server; every failure is an EnvironmentFailure.

    Calls without a timeout of their own end at `deadline`, a time of the monotonic clock.
    """

    def __init__(self, row: EnvironmentRow, root: str, settings: EnvPoolSettings) -> None:
        self.row = row
        self.root = root
        self._settings = settings
        self._check_timeout = min(_CHECK_TIMEOUT, settings.read_timeout or _CHECK_TIMEOUT)
        self._parts = urlsplit(root)
        self._http: http.client.HTTPConnection | None = None
        self._last_call = 0.0
        self._head = b""
        self.deadline = math.inf
        self.headers = authorization()

    def call(
        self, method: str, path: str, body: Any = None, timeout: float | None = None
    ) -> Response:
        """Sends one request; raises EnvironmentFailure unless a response arrives in time."""
        seconds = timeout or self._settings.read_timeout or self.row.read_timeout
        content = None if body is None else json.dumps(body).encode()
        left = math.inf if timeout else self.deadline - time.monotonic()
        if left <= 0:
            raise self._overdue(method, path)
        sock = self.connected(method, path).sock
        try:
            answer = send_request(
                sock,
                method,
                self._parts.path + path,
                self._head,
                content,
                min(seconds, left),
                MAX_RESPONSE,
            )
        except TimeoutError as error:
            self.close()
            if left < seconds:
                raise self._overdue(method, path) from error
            detail = f"no answer within {seconds:g} s"
            raise self.failure(FailureKind.TIMEOUT, method, path, detail) from error
        except (TooLarge, OverflowError, MemoryError) as error:
            self.close()
            detail = f"the answer is longer than {MAX_RESPONSE >> 20} MiB"
            raise self.failure(FailureKind.MALFORMED, method, path, detail) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.close()
            raise self._lost(method, path, error) from error
        self._last_call = time.monotonic()
        if not answer.reusable:
            self.close()
        if answer.status in (502, 504):
            detail = f"HTTP {answer.status}: a gateway does not reach the server"
            raise self.failure(FailureKind.CONNECTION, method, path, detail)
        own_items = answer.headers.get("x-items") == "manus_jax"
        return Response(answer.status, answer.content, own_items)

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a 200 response; raises if the response is an error."""
        response = self.call(method, path, body)
        text = response.text
        if response.is_page:
            detail = f"HTML instead of JSON (HTTP {response.status}): {shortened(text)}"
            raise self.failure(FailureKind.NOT_AGENTGYM, method, path, detail)
        if response.status != 200:
            detail = f"HTTP {response.status}: {shortened(text)}"
            raise self.failure(FailureKind.STATUS, method, path, detail)
        try:
            answer = _parsed(text)
        except (ValueError, RecursionError) as error:
            detail = f"broken JSON: {shortened(text)}"
            raise self.failure(FailureKind.MALFORMED, method, path, detail) from error
        if isinstance(answer, dict) and "error" in answer:
            detail = f"the server answered with an error: {shortened(text)}"
            raise self.failure(FailureKind.ERROR_ANSWER, method, path, detail)
        return answer

    def check(self) -> Response:
        """Raises unless the server is up: GET / responds in time, and not with a web page."""
        response = self.call("GET", "/", timeout=self._check_timeout)
        self._check_access(response, "GET", "/")
        if response.status != 200 or response.is_page:
            detail = f"not an AgentGym server (HTTP {response.status}): "
            detail += shortened(response.text)
            raise self.failure(FailureKind.NOT_AGENTGYM, "GET", "/", detail)
        return response

    def check_routes(self) -> None:
        """Raises unless the server is up and implements this environment's protocol.

        A step without fields changes nothing on any server. A FastAPI server replies with the
        missing fields, which distinguishes the two families of environments.
        """
        self.check()
        path = f"{self.row.prefix}/step"
        response = self.call("POST", path, {}, timeout=self._check_timeout)
        self._check_access(response, "POST", path)
        if response.status in (404, 405) or response.is_page:
            detail = f"this server has no such route (HTTP {response.status}), so it does not "
            detail += f"serve {self.row.name}"
            raise self.failure(FailureKind.NOT_AGENTGYM, "POST", path, detail)
        if response.status == 200 and b"error" not in response.content:
            detail = "a step without fields was accepted, so this is not an AgentGym server: "
            detail += shortened(response.text)
            raise self.failure(FailureKind.NOT_AGENTGYM, "POST", path, detail)
        missing = _missing_fields(response)
        if missing and self.row.id_field not in missing:
            detail = f"step wants {', '.join(missing)}, but {self.row.name} takes "
            detail += f"{self.row.id_field}, action; the server serves another environment"
            raise self.failure(FailureKind.NOT_AGENTGYM, "POST", path, detail)

    def _check_access(self, response: Response, method: str, path: str) -> None:
        if response.status in (401, 403):
            problem = "rejects the key in" if self.headers else "requires a key; set"
            detail = f"HTTP {response.status}: the server {problem} {KEY_VARIABLE}"
            raise self.failure(FailureKind.STATUS, method, path, detail)

    def failure(self, kind: FailureKind, method: str, path: str, detail: str) -> EnvironmentFailure:
        return EnvironmentFailure(kind, self.row.name, self.root, f"{method} {path}", detail)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def connected(self, method: str, path: str) -> http.client.HTTPConnection:
        """The open connection; the arguments name the call in failures."""
        if self._http is not None and (
            time.monotonic() - self._last_call > _IDLE_LIMIT or readable(self._http.sock)
        ):
            self.close()
        if self._http is None:
            secure = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            host, port = self._parts.hostname or "", self._parts.port
            try:
                SLOTS.leave()
                self._head = request_head(self._parts.netloc, {**self.headers, **_JSON})
                connection = kind(host, port, timeout=self._settings.connect_timeout)
                connection.connect()
            except TimeoutError as error:
                detail = f"no connection within {self._settings.connect_timeout:g} s"
                raise self.failure(FailureKind.TIMEOUT, method, path, detail) from error
            except (OSError, ValueError, http.client.InvalidURL) as error:
                raise self._lost(method, path, error) from error
            self._http = connection
        return self._http

    def _overdue(self, method: str, path: str) -> EnvironmentFailure:
        detail = "no answer within the time of the episode (rollout.episode_timeout)"
        return self.failure(FailureKind.OVERDUE, method, path, detail)

    def _lost(self, method: str, path: str, error: Exception) -> EnvironmentFailure:
        detail = f"{shortened(str(error) or type(error).__name__)}; is the server running?"
        return self.failure(FailureKind.CONNECTION, method, path, detail)


def _missing_fields(response: Response) -> list[str]:
    """The fields that a FastAPI 422 response reports as missing; empty for other responses."""
    if response.status != 422:
        return []
    try:
        detail = _parsed(response.text)["detail"]
        return [str(entry["loc"][-1]) for entry in detail if entry["type"] == "missing"]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        return []


def _parsed(text: str) -> Any:
    """The value of a JSON text; ValueError if it is broken or nested too deeply.

    The parser recurses on the C stack, which is small in the threads of episodes.
    """
    if text.count("[") + text.count("{") > _MAX_NESTING:
        depth = 0
        for mark in re.finditer(r"[][{}]", _STRING.sub("", text)):
            depth += 1 if mark[0] in "[{" else -1
            if depth > _MAX_NESTING:
                raise ValueError(f"nested more than {_MAX_NESTING} levels deep")
    return json.loads(text)


def authorization() -> dict[str, str]:
    """The header with the key in MANUS_JAX_ENV_KEY; empty if it is not set."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ServerSetupError(f"{KEY_VARIABLE} must consist of printable ASCII characters")
    return {"Authorization": f"Bearer {key}"}
