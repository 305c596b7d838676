"""One episode at the endpoint: its key, its limits, and what its requests have led to."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.protocol import EngineError, Sampling
from manus_jax.rollout.endpoint.openai_api import (
    ApiError,
    ChatRequest,
    context_exceeded,
)
from manus_jax.rollout.endpoint.recording import Recording
from manus_jax.rollout.llm_player import ChatTokenizer
from manus_jax.rollout.trajectory import EndReason

KEY_PREFIX = "episode-"

_LIMITS: dict[str | None, EndReason] = {
    "context_length_exceeded": "context",
    "turn_limit": "max_turns",
}
"""By the code of the refusal."""

EnvironmentCalls = Callable[[str, Any], dict[str, Any]]
"""("reset" or "step", JSON body) → JSON; ApiError if it is refused."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request gets. `fixed`: requests cannot choose their temperature, top_p and top_k,
    because the log-probs of the learner are those of the settings."""

    max_total_tokens: int
    max_tokens: int
    min_tokens: int
    max_turns: int | None
    timeout: float
    temperature: float
    top_p: float
    top_k: int
    fixed: bool

    @classmethod
    def of(cls, settings: RolloutSettings) -> "Limits":
        """Those of an episode in a run."""
        return cls(
            max_total_tokens=settings.max_total_tokens,
            max_tokens=settings.max_tokens_per_turn,
            min_tokens=settings.min_turn_tokens,
            max_turns=settings.max_turns,
            timeout=settings.generation_timeout,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            fixed=True,
        )

    @classmethod
    def standalone(cls, settings: RolloutSettings) -> "Limits":
        """Those of requests outside a run, which may choose how to sample."""
        length = settings.max_total_tokens
        return dataclasses.replace(
            cls.of(settings), max_tokens=length, min_tokens=1, max_turns=None, fixed=False
        )

    def sampling(self, request: ChatRequest, room: int, stop_ids: tuple[int, ...]) -> Sampling:
        """How to sample a reply with `room` tokens left; ApiError if they are too few."""
        most = min(self.max_tokens, request.max_tokens or self.max_tokens)
        if room < min(self.min_tokens, most):
            raise context_exceeded(room, self.max_total_tokens)
        own = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if not self.fixed:
            asked = {name: getattr(request, name) for name in own}
            own |= {name: value for name, value in asked.items() if value is not None}
        return Sampling(
            **own,  # type: ignore[arg-type]
            max_tokens=min(most, room),
            stop_ids=stop_ids,
            stop_strings=request.stop,
        )


class EndpointEpisode:
    """The state of one episode. `seed` gives the seed of a reply by the number of those before it.

    `environment` answers the requests of programs that play the environment over HTTP; it may be
    slow. Written by the endpoint's thread, read by the episode's when the program has ended.
    """

    def __init__(
        self,
        name: str,
        chat: ChatTokenizer,
        limits: Limits,
        seed: Callable[[int], int],
        environment: EnvironmentCalls | None = None,
    ) -> None:
        self.name, self.limits, self.seed, self.environment = name, limits, seed, environment
        self.id, self.key = secrets.token_hex(8), KEY_PREFIX + secrets.token_urlsafe(24)
        self.recording = Recording(chat)
        self.running: set[asyncio.Future[Any]] = set()
        self._expected = 0  # replies that are being sampled
        self.ended = False
        self.misuse: str | None = None
        self.refusal: ApiError | None = None  # of the newest request
        self.engine_error: EngineError | None = None  # of the newest request

    @property
    def sessions(self) -> list[str]:
        """The names of its streams in the engine."""
        return [self.session(number) for number in range(self.recording.sequences)]

    def session(self, sequence: int) -> str:
        return f"{self.name}/{sequence}"

    @property
    def limit(self) -> EndReason | None:
        """The limit that refused the newest request."""
        return None if self.refusal is None else _LIMITS.get(self.refusal.code)

    def check_turns(self, replies: int) -> int:
        """The number of replies so far, including those being sampled.

        Raises ApiError if `replies` more would exceed the turn limit.
        """
        most, before = self.limits.max_turns, len(self.recording) + self._expected
        if most is not None and before + replies > most:
            raise ApiError(
                400,
                f"the episode has {most - before} of its {most} turns left (rollout.max_turns), "
                f"and the request asks for {replies}",
                "turn_limit",
            )
        return before

    @contextlib.contextmanager
    def sampling(self, replies: int) -> Iterator[None]:
        """Counts replies while they are sampled."""
        self._expected += replies
        try:
            yield
        finally:
            self._expected -= replies
