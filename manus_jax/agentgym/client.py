"""One session on one environment server: create, reset, step, close.

The code is the same for every environment and is driven by its row in `table.py`. A response is
either an observation of the game or an `EnvironmentFailure` that names the environment, the URL,
the call and the response. A session belongs to one thread at a time.

Calls use the standard library's HTTP client: a call holds the interpreter lock for 0.2 ms, a
quarter of the time that requests needs, which bounds the number of concurrent episodes.
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind, shortened
from manus_jax.agentgym.rewards import EpisodeReward
from manus_jax.agentgym.table import EnvironmentRow
from manus_jax.config.server_settings import EnvPoolSettings

# uvicorn closes a connection that was idle for 5 s. A request sent at that moment would be lost,
# and a step must not be sent twice, so idle connections are closed here first.
_IDLE_LIMIT = 2.0
_CHECK_TIMEOUT = 5.0
_CLOSE_TIMEOUT = 10.0

Listener = Callable[[EnvironmentFailure | None], None]
"""Called with every failure of a call, and with None after every successful step."""


@dataclass(frozen=True)
class StepResult:
    """The result of one action. The rewards of an episode's steps sum to its reward."""

    observation: str
    reward: float
    done: bool
    info: Mapping[str, Any]


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
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
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
    """One HTTP connection to one server; every failure is an EnvironmentFailure."""

    def __init__(self, row: EnvironmentRow, root: str, settings: EnvPoolSettings) -> None:
        self.row = row
        self.root = root
        self._settings = settings
        self._check_timeout = min(_CHECK_TIMEOUT, settings.read_timeout or _CHECK_TIMEOUT)
        self._parts = urlsplit(root)
        self._http: http.client.HTTPConnection | None = None
        self._last_call = 0.0

    def call(
        self, method: str, path: str, body: Any = None, timeout: float | None = None
    ) -> Response:
        """Sends one request; raises EnvironmentFailure if no response arrives."""
        read = timeout or self._settings.read_timeout or self.row.read_timeout
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection = self._connected(method, path)
        try:
            connection.sock.settimeout(read)
            connection.request(method, self._parts.path + path, content, headers)
            answer = connection.getresponse()
            response = Response(answer.status, answer.read())
        except TimeoutError as error:
            self.close()
            detail = f"no answer within {read:g} s"
            raise self.failure(FailureKind.TIMEOUT, method, path, detail) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._lost(method, path, error) from error
        self._last_call = time.monotonic()
        if answer.will_close:
            self.close()
        return response

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
            answer = json.loads(text)
        except ValueError as error:
            detail = f"broken JSON: {shortened(text)}"
            raise self.failure(FailureKind.MALFORMED, method, path, detail) from error
        if isinstance(answer, dict) and "error" in answer:
            detail = f"the server answered with an error: {shortened(text)}"
            raise self.failure(FailureKind.ERROR_ANSWER, method, path, detail)
        return answer

    def check(self) -> None:
        """Raises unless the server is up: GET / responds in time, and not with a web page."""
        response = self.call("GET", "/", timeout=self._check_timeout)
        if response.status != 200 or response.is_page:
            detail = f"not an AgentGym server (HTTP {response.status}): "
            detail += shortened(response.text)
            raise self.failure(FailureKind.NOT_AGENTGYM, "GET", "/", detail)

    def check_routes(self) -> None:
        """Raises unless the server is up and implements this environment's protocol.

        A step without fields changes nothing on any server. A FastAPI server replies with the
        missing fields, which distinguishes the two families of environments.
        """
        self.check()
        path = f"{self.row.prefix}/step"
        response = self.call("POST", path, {}, timeout=self._check_timeout)
        if response.status in (404, 405) or response.is_page:
            detail = f"this server has no such route (HTTP {response.status}), so it does not "
            detail += f"serve {self.row.name}"
            raise self.failure(FailureKind.NOT_AGENTGYM, "POST", path, detail)
        missing = _missing_fields(response)
        if missing and self.row.id_field not in missing:
            detail = f"step wants {', '.join(missing)}, but {self.row.name} takes "
            detail += f"{self.row.id_field}, action; the server serves another environment"
            raise self.failure(FailureKind.NOT_AGENTGYM, "POST", path, detail)

    def failure(self, kind: FailureKind, method: str, path: str, detail: str) -> EnvironmentFailure:
        return EnvironmentFailure(kind, self.row.name, self.root, f"{method} {path}", detail)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def _connected(self, method: str, path: str) -> http.client.HTTPConnection:
        if self._http is not None and time.monotonic() - self._last_call > _IDLE_LIMIT:
            self.close()
        if self._http is None:
            secure = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            host, port = self._parts.hostname or "", self._parts.port
            try:
                connection = kind(host, port, timeout=self._settings.connect_timeout)
                connection.connect()
            except TimeoutError as error:
                detail = f"no connection within {self._settings.connect_timeout:g} s"
                raise self.failure(FailureKind.TIMEOUT, method, path, detail) from error
            except (OSError, UnicodeError, http.client.InvalidURL) as error:
                raise self._lost(method, path, error) from error
            self._http = connection
        return self._http

    def _lost(self, method: str, path: str, error: Exception) -> EnvironmentFailure:
        detail = f"{shortened(str(error) or type(error).__name__)}; is the server running?"
        return self.failure(FailureKind.CONNECTION, method, path, detail)


class Session:
    """One game on one server, to be played by one thread at a time.

    `create` once, then `reset` and `step` for each episode, then `close`.
    """

    def __init__(
        self,
        row: EnvironmentRow,
        root: str,
        settings: EnvPoolSettings | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.row = row
        self.root = root
        self.id: int | str | None = None
        self.listener = listener
        self._connection = Connection(row, root, settings or EnvPoolSettings())
        self._episode: EpisodeReward | None = None
        self._done = True

    @property
    def episode_reward(self) -> float:
        """The reward of the episode up to its last valid step, on a scale whose best is 1."""
        return self._episode.total if self._episode else 0.0

    @property
    def success(self) -> bool:
        return self._episode.success if self._episode else False

    def create(self) -> None:
        """Creates a new game on the server."""
        with self._reporting():
            answer = self._call("create", "POST", self.row.create_body)
            identifier = (
                answer if self.row.bare_id else self._field(answer, self.row.id_field, "create")
            )
            if isinstance(identifier, bool) or not isinstance(identifier, int | str):
                raise self._malformed("create", f"no session id in {shortened(repr(answer))}")
            self.id = identifier

    def reset(self, item: int) -> str:
        """Starts the episode of task `item` and returns its first observation."""
        self._episode, self._done = None, True
        body = self._with_id({**self.row.reset_extra, self.row.item_field: item})
        with self._reporting(item):
            answer = self._call("reset", "POST", body)
            self._check_backend("reset", answer)
            look = None
            if self.row.look:
                look = self._call(f"{self.row.look}?{urlencode(self._with_id({}))}", "GET")
            try:
                view = self.row.first_view(answer, look)
            except (KeyError, TypeError, IndexError) as error:
                detail = f"no observation in {shortened(repr(answer))}"
                raise self._malformed("reset", detail) from error
            if not isinstance(view, str):
                raise self._malformed("reset", f"the observation is {shortened(repr(view))}")
        self._episode, self._done = EpisodeReward(self.row.reward), False
        return view

    def step(self, action: str) -> StepResult:
        """Plays one action (or the model's full text, where the server parses it)."""
        if self._episode is None or self._done:
            raise RuntimeError(f"{self.row.name}: the episode is over or not begun; call reset")
        body = self._with_id({"action": action})
        with self._reporting():
            answer = self._call("step", "POST", body)
            view = self._field(answer, self.row.view_field, "step")
            done = self._field(answer, self.row.done_field, "step")
            value = self._field(answer, self.row.reward.field, "step")
            types = isinstance(view, str), isinstance(done, bool), isinstance(value, int | float)
            if not all(types):
                raise self._malformed("step", f"wrong types in {shortened(repr(answer))}")
            self._check_backend("step", answer)
            done = done or any(marker in view for marker in self.row.done_markers)
            try:
                reward = self._episode.record(value, done)
            except ValueError as error:
                raise self._malformed("step", f"{error} in {shortened(repr(answer))}") from error
        self._done = done
        used = (self.row.view_field, self.row.done_field)
        info = {key: part for key, part in answer.items() if key not in used}
        if self.listener:
            self.listener(None)
        return StepResult(view, reward, done, info)

    def close(self) -> None:
        """Closes the game, where the server has a route for that, and the connection."""
        path = f"{self.row.prefix}/close"
        try:
            if self.id is None:
                return
            response = self._connection.call("POST", path, self._with_id({}), _CLOSE_TIMEOUT)
            # AgentGym servers without a close route answer 404; the embedded ones all have one.
            expected = (200,) if self.row.closes else (200, 404, 405)
            if response.status not in expected:
                detail = f"HTTP {response.status}: {shortened(response.text)}"
                raise self._failure(FailureKind.STATUS, "close", detail)
        finally:
            self.id = None
            self._connection.close()

    def disconnect(self) -> None:
        """Drops the connection and keeps the game; the next call connects again."""
        self._connection.close()

    def _with_id(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.id is None:
            raise RuntimeError(f"{self.row.name}: the session is closed or not created")
        return {self.row.id_field: self.id, **body}

    @contextmanager
    def _reporting(self, item: int | None = None) -> Iterator[None]:
        """Reports a failure in the block to the listener.

        If the server refuses an item that AgentGym does not have, the dataset is at fault.
        """
        try:
            yield
        except EnvironmentFailure as failure:
            items = self.row.items
            if failure.kind.refusal and item is not None and items and item not in items:
                detail = f"item {item} is outside {items.start}..{items.stop - 1}; {failure.detail}"
                failure = EnvironmentFailure(
                    FailureKind.ITEM, failure.env, failure.url, failure.call, detail
                )
            if self.listener:
                self.listener(failure)
            raise failure from failure.__cause__

    def _call(self, route: str, method: str, body: Any = None) -> Any:
        return self._connection.json(method, f"{self.row.prefix}/{route}", body)

    def _field(self, answer: Any, key: str, route: str) -> Any:
        if not isinstance(answer, dict) or key not in answer:
            raise self._malformed(route, f"no {key!r} in {shortened(repr(answer))}")
        return answer[key]

    def _check_backend(self, route: str, answer: Any) -> None:
        try:
            failed = self.row.backend_failed(answer)
        except (KeyError, TypeError, AttributeError) as error:
            raise self._malformed(route, f"no observation in {shortened(repr(answer))}") from error
        if failed:
            detail = f"a service that the server depends on failed: {shortened(repr(answer))}"
            raise self._failure(FailureKind.BACKEND, route, detail)

    def _malformed(self, route: str, detail: str) -> EnvironmentFailure:
        return self._failure(FailureKind.MALFORMED, route, detail)

    def _failure(self, kind: FailureKind, route: str, detail: str) -> EnvironmentFailure:
        return self._connection.failure(kind, "POST", f"{self.row.prefix}/{route}", detail)


def _missing_fields(response: Response) -> list[str]:
    """The fields that a FastAPI 422 response reports as missing; empty for other responses."""
    if response.status != 422:
        return []
    try:
        detail = json.loads(response.content)["detail"]
        return [str(entry["loc"][-1]) for entry in detail if entry["type"] == "missing"]
    except (ValueError, KeyError, TypeError, IndexError):
        return []
