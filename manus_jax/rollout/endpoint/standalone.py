"""The endpoint as a separate server: `/v1/chat/completions`, and episodes recorded on request.

`POST /v1/episodes` returns a new API key. Requests under it are recorded as one episode, and
`POST /v1/episodes/end` under it returns the tokens. Requests under any other key, or none, are
answered and not recorded.
"""

import secrets
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from manus_jax.engines.protocol import Engine
from manus_jax.engines.usage import UsageClock
from manus_jax.rollout.endpoint.episode import KEY_PREFIX, EndpointEpisode, Limits
from manus_jax.rollout.endpoint.openai_api import ApiError
from manus_jax.rollout.endpoint.recording import record
from manus_jax.rollout.endpoint.server import Endpoint, bearer, models
from manus_jax.rollout.llm_player import ChatTokenizer

MAX_EPISODES = 4096


class StandaloneEndpoint:
    """Serves until `close`."""

    def __init__(self, engine: Engine, chat: ChatTokenizer, limits: Limits, port: int = 0) -> None:
        self._chat, self._limits = chat, limits
        self._episodes: dict[str, EndpointEpisode] = {}  # by key
        self._endpoint = Endpoint(engine, chat, UsageClock(), port=port, more_routes=self._routes)
        self.url = f"{self._endpoint.root}/v1"

    def close(self) -> None:
        self._endpoint.close()

    def _routes(self, endpoint: Endpoint) -> list[Route]:
        return [
            endpoint.route("POST", "/v1/chat/completions", self._completions),
            endpoint.route("GET", "/v1/models", self._models),
            endpoint.route("POST", "/v1/episodes", self._open),
            endpoint.route("POST", "/v1/episodes/end", self._end),
        ]

    def _new(self) -> EndpointEpisode:
        name = f"endpoint/{secrets.token_hex(8)}"
        return EndpointEpisode(name, self._chat, self._limits, lambda _: secrets.randbits(31))

    def _episode(self, http: HttpRequest) -> EndpointEpisode | None:
        key = bearer(http)
        if not key.startswith(KEY_PREFIX):
            return None
        if key not in self._episodes:
            raise ApiError(401, "the episode has ended", "episode_ended")
        return self._episodes[key]

    async def _completions(self, http: HttpRequest) -> Response:
        recorded = self._episode(http)
        if recorded is not None:
            return await self._endpoint.complete(recorded, http)
        once = self._new()
        try:
            return await self._endpoint.complete(once, http)
        finally:
            self._endpoint.end(once)

    async def _models(self, http: HttpRequest) -> dict[str, Any]:
        return models()

    async def _open(self, http: HttpRequest) -> dict[str, Any]:
        if len(self._episodes) >= MAX_EPISODES:
            raise ApiError(429, f"there are {MAX_EPISODES} open episodes; end some")
        episode = self._new()
        self._episodes[episode.key] = episode
        return {"api_key": episode.key}

    async def _end(self, http: HttpRequest) -> dict[str, Any]:
        episode = self._episode(http)
        if episode is None:
            raise ApiError(401, "this is not the API key of an episode", "invalid_api_key")
        del self._episodes[episode.key]
        self._endpoint.end(episode)
        return {"segments": record(episode.recording)}
