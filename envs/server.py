"""The HTTP server of an environment: an `EnvironmentSpec` in, a FastAPI application out.

Routes, field names, status codes and error shapes match those of AgentGym's servers of the same id
family, so AgentGym's own client works unchanged. Additions are invisible to clients: limits on
sessions, expiry, a close route everywhere, actions that cannot crash the server, no requests from
web pages, and an optional API key. Handlers parse the body themselves, because FastAPI's parameter
handling costs more than a step of a cheap game.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from envs.game import (
    Answer,
    EnvironmentSpec,
    GameError,
    Session,
    SessionRoute,
    StaticRoute,
    Step,
    StepRoute,
)
from envs.sessions import SessionTable

MAX_BODY_BYTES = 2 * 1024 * 1024
MAX_SESSIONS_PER_CLIENT = 1024
_logger = logging.getLogger(__name__)
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_SessionId = Annotated[int, Field(gt=-(2**63), lt=2**63)]
_SESSION_ID = TypeAdapter(_SessionId)
_ITEMS = {"X-Items": "manus_jax"}  # distinguishes these items from those of AgentGym's servers

Handler = Callable[[Request], Awaitable[Any]]


def build_app(
    spec: EnvironmentSpec,
    max_sessions: int | None = None,
    session_ttl: float = 3600.0,
    clock: Callable[[], float] = time.monotonic,
    max_sessions_per_client: int = MAX_SESSIONS_PER_CLIENT,
    api_key: str | None = None,
) -> FastAPI:
    """The application that serves `spec`.

    Sessions unused for `session_ttl` seconds are closed. With `api_key`, every request needs the
    header `Authorization: Bearer KEY`.
    """
    limits = max_sessions or spec.max_sessions, max_sessions_per_client
    service = _Service(spec, SessionTable(*limits, session_ttl, clock), session_ttl)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(service.sweep_forever())
        yield
        sweeper.cancel()
        await service.close_all()

    app = FastAPI(title=spec.name, lifespan=lifespan, openapi_url=None)

    def add(method: str, path: str, handler: Handler) -> None:
        app.add_route(path, _endpoint(spec, service, handler, api_key), methods=[method])

    async def health(_: Request) -> str:
        return spec.health

    async def list_envs(request: Request) -> list[int]:
        return service.table.ids(_client(request))

    for root in {"/", f"{spec.prefix}/"}:
        add("GET", root, health)
    add("GET", f"{spec.prefix}/list_envs", list_envs)
    add("POST", f"{spec.prefix}/create", service.create)
    add("POST", f"{spec.prefix}/reset", service.reset)
    add("POST", f"{spec.prefix}/step", service.stepping(spec.step_answer))
    add("POST", f"{spec.prefix}/close", service.close)
    add("GET", f"{spec.prefix}/observation", service.answering("GET", spec.observation_answer))
    if spec.detail_answer is not None:
        add("GET", f"{spec.prefix}/detail", service.answering("GET", spec.detail_answer))
    for route in spec.routes:
        path = spec.prefix + route.path
        match route:
            case SessionRoute():
                add(route.method, path, service.answering(route.method, route.answer))
            case StepRoute():
                add("POST", path, service.stepping(route.answer, route.read))
            case StaticRoute():
                add("GET", path, _static(route))
    return app


class _Service:
    """The request handlers of one application and its session table."""

    def __init__(self, spec: EnvironmentSpec, table: SessionTable, ttl: float) -> None:
        self.spec = spec
        self.table = table
        self._ttl = ttl
        id_field: Any = (_SessionId, ...)
        item_field: Any = (int, ...) if spec.default_item is None else (int | None, None)
        self._close_body = create_model("CloseBody", **{spec.family: id_field})
        self._reset_body = create_model(
            "ResetBody", **{spec.family: id_field, spec.item_field: item_field}
        )
        action_field: Any = (str, ...)
        self._step_body = create_model(
            "StepBody", **{spec.family: id_field, "action": action_field}
        )

    async def create(self, request: Request) -> Any:
        spec = self.spec
        body = await _read_body(request, spec.create_body) if spec.create_body else None
        client = _client(request)
        self.table.check_room(client)
        game = await self._run(spec.new_game)
        try:
            session = self.table.add(game, client)
        except GameError:
            await self._run(game.close)
            raise
        item = spec.create_item(session, body) if spec.create_item else None
        if item is not None:
            try:
                await self._start(session, item)
            except GameError:
                await self._drop(session)
                raise
        if spec.create_answer is not None:
            return spec.create_answer(session)
        return {"id": session.id} if spec.family == "id" else session.id

    async def reset(self, request: Request) -> Any:
        body = await _read_body(request, self._reset_body)
        async with self._session(getattr(body, self.spec.family)) as session:
            item = getattr(body, self.spec.item_field)
            if item is None and self.spec.default_item is not None:
                item = self.spec.default_item(session)
            await self._start(session, item)
            return self.spec.reset_answer(session)

    def stepping(self, answer: Answer, read: Callable[[str], str] = str) -> Handler:
        """The handler of a route that plays the action that `read` extracts from the text sent."""

        async def handler(request: Request) -> Any:
            body: Any = await _read_body(request, self._step_body)
            action = clean_action(read(body.action), self.spec.max_action)
            async with self._session(getattr(body, self.spec.family)) as session:
                if session.current.done:
                    raise _finished(session)
                return await self._run(_play, session, action, answer)

        return handler

    async def close(self, request: Request) -> bool:
        body = await _read_body(request, self._close_body)
        session = self.table.remove(getattr(body, self.spec.family))
        if session is None:
            return False
        await self._drop(session)
        return True

    def answering(self, method: str, answer: Answer) -> Handler:
        """The handler of a route that only reads its session."""

        async def handler(request: Request) -> Any:
            if method == "GET":
                session_id = _query_id(request, self.spec.family)
            else:
                body = await _read_body(request, self._close_body)
                session_id = getattr(body, self.spec.family)
            async with self._session(session_id) as session:
                if session.done and not self.spec.answers_when_done:
                    raise _finished(session)
                return await self._run(answer, session)

        return handler

    async def sweep(self) -> None:
        """Closes expired sessions."""
        for session in self.table.take_expired():
            await self._drop(session)

    async def sweep_forever(self) -> None:
        """Closes expired sessions even if no more requests arrive."""
        while True:
            await asyncio.sleep(min(max(self._ttl / 4, 0.05), 60.0))
            await self.sweep()

    async def close_all(self) -> None:
        for session in self.table.take_all():
            await self._drop(session)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.spec.cheap:
            return function(*args)
        return await run_in_threadpool(function, *args)

    async def _start(self, session: Session, item: int) -> None:
        observation = await self._run(session.game.reset, item)
        session.item = item
        session.last = Step(observation, 0, False)
        session.total_reward = 0

    async def _drop(self, session: Session) -> None:
        """Removes the session and closes its game; a failure to close is only logged."""
        self.table.remove(session.id)
        async with session.lock:
            try:
                await self._run(session.game.close)
            except Exception:
                _logger.exception("closing the game of session %d failed", session.id)

    @contextlib.asynccontextmanager
    async def _session(self, session_id: int) -> AsyncIterator[Session]:
        """Exclusive access to a live session. A waiting request fails if it is closed meanwhile."""
        session = self.table.get(session_id)
        async with session.lock:
            if session not in self.table:
                raise GameError(f"The id {session_id} is not valid.")
            try:
                yield session
            finally:
                self.table.touch(session)


def clean_action(action: str, limit: int) -> str:
    """The first `limit` characters, with control characters and surrogates replaced by U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", action[:limit])


def _play(session: Session, action: str, answer: Answer) -> Any:
    session.last = session.game.step(action)
    session.total_reward += session.last.reward
    return answer(session)


def _finished(session: Session) -> GameError:
    return GameError(f"The task with environment {session.id} has finished.")


def _static(route: StaticRoute) -> Handler:
    async def handler(_: Request) -> Any:
        return route.answer()

    return handler


def _client(request: Request) -> str:
    return request.client.host if request.client else ""


def _check_sender(request: Request, api_key: str | None) -> None:
    """Refuses requests without the key and requests that a browser sends for some web page.

    Browsers add an Origin header to every request of a page that is not a plain GET, and send the
    other content types without asking the server first. Clients do neither.
    """
    headers = request.headers
    if api_key is not None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), api_key.encode()):
            raise HTTPException(
                401,
                "This server needs its API key in the header 'Authorization: Bearer KEY'.",
                {"WWW-Authenticate": "Bearer"},
            )
    if "origin" in headers:
        raise HTTPException(403, "Requests from web pages are not allowed.")
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":
        raise HTTPException(415, "The content type of a body must be application/json.")


def _endpoint(
    spec: EnvironmentSpec, service: _Service, handler: Handler, api_key: str | None
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        _check_sender(request, api_key)
        await service.sweep()
        try:
            value = await handler(request)
        except GameError as error:
            if spec.family == "env_idx":
                return Response(f"Internal Server Error: {error}", 500, media_type="text/plain")
            value = {"error": str(error)}
        except (RequestValidationError, HTTPException):
            raise
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        except asyncio.CancelledError:
            return Response("The server is shutting down.", 503, media_type="text/plain")
        except Exception as error:
            # uvicorn would drop the connection, which other sessions of the client may share.
            _logger.exception("%s %s failed", request.method, request.url.path)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            told = f"Internal Server Error: {reason}".encode(errors="replace")
            return Response(told, 500, media_type="text/plain")
        content = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return Response(content.encode(), headers=_ITEMS, media_type="application/json")

    return endpoint


def _missing(*loc: str) -> dict[str, Any]:
    return {"type": "missing", "loc": loc, "msg": "Field required", "input": None}


async def _read_body(request: Request, model: type[BaseModel]) -> BaseModel:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    if not raw:
        raise RequestValidationError([_missing("body")])
    try:
        return model.model_validate_json(bytes(raw))
    except ValidationError as error:
        raise _invalid(error, "body") from None


def _query_id(request: Request, name: str) -> int:
    if name not in request.query_params:
        raise RequestValidationError([_missing("query", name)])
    try:
        return _SESSION_ID.validate_python(request.query_params[name])
    except ValidationError as error:
        raise _invalid(error, "query", name) from None


def _invalid(error: ValidationError, *where: str) -> RequestValidationError:
    """The error as FastAPI reports it, with every input in a form that JSON can express."""
    found = error.errors(include_url=False, include_context=False)
    for problem in found:
        problem["loc"] = (*where, *problem["loc"])
        if problem["type"] == "json_invalid":
            problem["input"] = {}
        try:
            small = len(json.dumps(problem["input"], allow_nan=False)) < 1000
        except ValueError:  # infinite, or not a number
            small = False
        if not small:
            problem["input"] = ascii(problem["input"])[:100]
    return RequestValidationError(found)
