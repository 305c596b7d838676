"""The HTTP server of the endpoint: chat completions on top of any engine.

Every episode has its own URL and API key, so that each request is assigned to its episode and a
program that mixes up episodes is detected. Requests wait for the engine in one event loop, in a
thread of its own.
"""

import asyncio
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from envs.bounded_connection import BoundedConnection
from manus_jax.config.settings import RolloutSettings
from manus_jax.data.chat import ChatTemplateError, Message
from manus_jax.engines.protocol import (
    Engine,
    EngineError,
    Generation,
    Request,
    Sampling,
    check_generation,
)
from manus_jax.engines.usage import UsageClock
from manus_jax.rollout.endpoint.episode import EndpointEpisode, EnvironmentCalls, Limits
from manus_jax.rollout.endpoint.openai_api import (
    ApiError,
    ChatRequest,
    Choice,
    completion,
    completion_events,
    context_exceeded,
    make_choice,
    read_request,
)
from manus_jax.rollout.endpoint.recording import Prompt
from manus_jax.rollout.llm_player import ChatTokenizer, turn_seed

MAX_BODY_BYTES = 16 << 20
MAX_NESTING = 64  # of a body; templates and JSON writers recurse
_KEEP_ALIVE_S = 600  # a client that finds its idle connection closed would have to try again
_log = logging.getLogger(__name__)

Handler = Callable[[HttpRequest], Awaitable[Any]]


class Endpoint:
    """Serves episodes until `close`. All methods are thread-safe."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatTokenizer,
        usage: UsageClock,
        seed: int = 0,
        port: int = 0,
        more_routes: "Callable[[Endpoint], list[Route]]" = lambda endpoint: [],
    ) -> None:
        self._engine, self._chat, self._usage, self._seed = engine, chat, usage, seed
        self._episodes: dict[str, EndpointEpisode] = {}
        self._warned = False
        app = Starlette(
            routes=[
                self.route("POST", "/episodes/{id}/v1/chat/completions", self._completions),
                self.route("GET", "/episodes/{id}/v1/models", self._models),
                self.route("POST", "/episodes/{id}/environment/{call}", self._environment),
                *more_routes(self),
            ],
            exception_handlers={404: _no_route, 405: _no_route},
        )
        self._socket = socket.create_server(("127.0.0.1", port), backlog=2048)
        self.root = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=BoundedConnection,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)), name="endpoint", daemon=True
        )
        self._thread.start()
        ready.wait()

    def open(
        self,
        uid: str,
        attempt: int,
        settings: RolloutSettings,
        environment: EnvironmentCalls | None = None,
    ) -> EndpointEpisode:
        """Serves the requests of an attempt at an episode, until it is ended."""
        seed = lambda replies: turn_seed(self._seed, uid, replies)
        limits = Limits.of(settings)
        episode = EndpointEpisode(f"{uid}/{attempt}", self._chat, limits, seed, environment)
        self._episodes[episode.id] = episode
        return episode

    def end(self, episode: EndpointEpisode) -> None:
        """Cancels the episode's requests and refuses further ones; may be called more than once."""
        if episode.ended:
            return
        episode.ended = True
        self._episodes.pop(episode.id, None)
        self._loop.call_soon_threadsafe(lambda: [work.cancel() for work in [*episode.running]])
        for session in episode.sessions:
            try:
                self._engine.release(session)
            except EngineError as error:  # the only effect: the engine's cache is not freed
                _log.warning("%s was not released: %s", session, error)

    def base_url(self, episode: EndpointEpisode) -> str:
        """What a program gets as OPENAI_BASE_URL."""
        return f"{self.root}/episodes/{episode.id}/v1"

    def environment_url(self, episode: EndpointEpisode) -> str:
        """Where a program in another process plays the episode's environment."""
        return f"{self.root}/episodes/{episode.id}/environment"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._shut_down)
        self._thread.join()
        self._socket.close()

    def _shut_down(self) -> None:
        # Clients that are still sending would delay the end, which uvicorn reports as an error.
        for connection in [*self._server.server_state.connections]:
            connection.transport.close()
        self._server.should_exit = True

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        ready.set()
        await self._server.serve(sockets=[self._socket])

    def route(self, method: str, path: str, handler: Handler) -> Route:
        """A route whose handler returns a JSON value or a Response, or raises ApiError."""

        async def answer(request: HttpRequest) -> Response:
            try:
                if "origin" in request.headers:
                    raise ApiError(403, "requests from web pages are not allowed")
                value = await handler(request)
            except ApiError as error:
                return JSONResponse(error.body(), error.status)
            except ClientDisconnect:
                return Response(status_code=400)  # which nobody reads
            return value if isinstance(value, Response) else JSONResponse(value)

        return Route(path, answer, methods=[method])

    async def complete(self, episode: EndpointEpisode, http: HttpRequest) -> Response:
        """The response to a chat completion under the episode's key."""
        episode.engine_error = episode.refusal = None
        try:
            return await self._complete(episode, http)
        except ApiError as refusal:
            if not episode.ended:
                episode.refusal = refusal
            raise

    async def _complete(self, episode: EndpointEpisode, http: HttpRequest) -> Response:
        request = read_request(await read_json(http))
        most = episode.limits.max_total_tokens
        if sum(len(m.content) for m in request.messages) > most * self._chat.longest_token:
            # Tokenizing it would keep all other requests waiting.
            raise context_exceeded(0, most)
        try:
            prompt = episode.recording.prompt(self._with_tool_role(request), request.tools)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from None
        try:
            done = await self._sample(episode, request, prompt, http)
        except BaseException as error:
            episode.recording.give_up(prompt)
            if isinstance(error, EngineError):
                episode.engine_error = error
                raise ApiError(503, str(error), "engine_error") from None
            raise
        choices, completion_tokens = done
        counts = len(prompt.ids), completion_tokens
        if not request.stream:
            return JSONResponse(completion(request, choices, *counts))
        events = completion_events(request, choices, *counts)
        return Response(events, media_type="text/event-stream")

    async def _sample(
        self, episode: EndpointEpisode, request: ChatRequest, prompt: Prompt, http: HttpRequest
    ) -> tuple[list[Choice], int]:
        """Samples and records the replies to a prompt; returns them and their tokens."""
        limits = episode.limits
        replies = episode.check_turns(request.n)
        room = min(limits.max_total_tokens, self._engine.max_length) - len(prompt.ids)
        sampling = limits.sampling(request, room, self._chat.stop_ids)
        prompts = episode.recording.copies(prompt, request.n)
        began = time.perf_counter()
        with self._usage.request(), episode.sampling(request.n):
            submitted = [
                asyncio.wrap_future(
                    self._engine.submit(
                        Request(
                            each.ids,
                            sampling,
                            _seed(episode, request, replies, number),
                            episode.session(each.sequence),
                        )
                    )
                )
                for number, each in enumerate(prompts)
            ]
            generations = await self._result(episode, asyncio.gather(*submitted), http)
        seconds = time.perf_counter() - began
        for generation in generations:  # all are recorded, or none
            check_generation(generation, sampling)
        choices = []
        for each, generation in zip(prompts, generations, strict=True):
            text, choice = self._choice(request, generation, sampling)
            episode.recording.add(each, generation, text, choice.message, seconds)
            choices.append(choice)
        return choices, sum(len(each.token_ids) for each in generations)

    async def _result(
        self, episode: EndpointEpisode, work: "asyncio.Future[list[Generation]]", http: HttpRequest
    ) -> list[Generation]:
        """Waits for the engine, unless the client hangs up, the time is over or the episode is."""
        hung_up = asyncio.ensure_future(http.receive())
        episode.running.add(work)
        try:
            waiting: list[asyncio.Future[Any]] = [work, hung_up]
            await asyncio.wait(
                waiting, timeout=episode.limits.timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if episode.ended:
                raise _ended()
            if work.done():
                return work.result()
            if hung_up.done():
                raise ClientDisconnect
            raise EngineError(f"the engine did not respond within {episode.limits.timeout:g} s")
        finally:
            episode.running.discard(work)
            # asyncio would log the exception of work that nobody waits for any more.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            work.cancel()
            hung_up.cancel()

    def _choice(
        self, request: ChatRequest, generation: Generation, sampling: Sampling
    ) -> tuple[str, Choice]:
        """The text of all tokens, and the reply that the client gets."""
        ids, log_probs = generation.token_ids, generation.log_probs
        text = self._chat.decode(ids)
        if self._chat.opens_thought:  # in the prompt, where clients do not see it
            text = f"<think>\n{text}"
        tokens = None
        if request.logprobs:
            tokens = tuple(
                (self._chat.decode([token]), log_prob)
                for token, log_prob in zip(ids, log_probs, strict=True)
                if token not in sampling.stop_ids
            )
        return text, make_choice(text, request, generation.finish_reason == "length", tokens)

    def _with_tool_role(self, request: ChatRequest) -> list[Message]:
        """The messages, with the role that the chat template has for the results of tools."""
        if not request.tools:
            return [*request.messages]
        role = self._chat.reply_role(request.tools)  # raises if it does not show tools
        return [
            Message(role, message.content) if message.role == "tool" else message
            for message in request.messages
        ]

    async def _completions(self, http: HttpRequest) -> Response:
        return await self.complete(self._episode(http), http)

    async def _models(self, http: HttpRequest) -> dict[str, Any]:
        self._episode(http)
        return models()

    async def _environment(self, http: HttpRequest) -> dict[str, Any]:
        episode = self._episode(http)
        call, body = http.path_params["call"], await read_json(http)
        if episode.environment is None or call not in ("reset", "step"):
            raise ApiError(404, f"the episode has no environment call {call!r}")
        return await run_in_threadpool(episode.environment, call, body)

    def _episode(self, http: HttpRequest) -> EndpointEpisode:
        """The episode of a request; ApiError unless it has the episode's URL and key."""
        key, episode = bearer(http), self._episodes.get(http.path_params["id"])
        if episode is None:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "a program calls the endpoint although its episode has ended; such calls are "
                    "refused and not recorded"
                )
            raise _ended()
        if not hmac.compare_digest(key.encode(), episode.key.encode()):
            if any(key == other.key for other in [*self._episodes.values()]):
                episode.misuse = "it uses the API key of another episode"
                raise ApiError(403, "this is the API key of another episode", "wrong_episode")
            raise ApiError(401, "this is not the API key of the episode", "invalid_api_key")
        return episode


async def _no_route(http: HttpRequest, error: Any) -> Response:
    refused = ApiError(
        error.status_code,
        f"there is no {http.method} {http.url.path}: the endpoint has chat completions only, at "
        "POST /v1/chat/completions",
    )
    return JSONResponse(refused.body(), refused.status)


def _ended() -> ApiError:
    return ApiError(401, "the episode has ended", "episode_ended")


def bearer(http: HttpRequest) -> str:
    """The API key of a request; "" if it has none."""
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def models() -> dict[str, Any]:
    """The list of models: one, which is what every request gets."""
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "manus_jax"}
    return {"object": "list", "data": [model]}


async def read_json(http: HttpRequest) -> Any:
    """The JSON body of a request."""
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    try:
        text = raw.decode() or "{}"
        value = json.loads(text, parse_constant=_not_json)
        if "\\u" in text:  # half of a character, which no response can repeat
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
    if _deeper(value, MAX_NESTING):
        raise ApiError(400, f"the body is nested more than {MAX_NESTING} levels deep")
    return value


def _not_json(name: str) -> Any:
    raise ValueError(name)  # NaN and infinities


def _deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(part, levels - 1) for part in parts)


def _seed(episode: EndpointEpisode, request: ChatRequest, replies: int, number: int) -> int:
    if episode.limits.fixed or request.seed is None:
        return episode.seed(replies + number)
    return (request.seed + number) % 2**31
