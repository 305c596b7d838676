"""The engine protocol: token ids in; token ids, log-probs and weight versions out.

An engine is shared by all episodes. A request contains the complete token stream of its episode.
The session identifies the stream, so that the engine can reuse the keys and values of its prefix.
Results do not depend on what else is being generated.
"""

import dataclasses
import math
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from manus_jax.errors import UserError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Request:
    """`prompt_ids` is the episode's token stream so far; `seed` determines the sample.

    The experts of the first `known_experts` prompt tokens are not needed (`Generation`).
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    session: str
    known_experts: int = 0


@dataclasses.dataclass(frozen=True)
class Generation:
    """Sampled ids (including the stop token), their log-probs and their weight versions.

    Log-probs are of the distribution that was sampled from, i.e. after temperature, top-p, top-k
    and min-p. `experts` [tokens, layers, experts per token], of an engine that returns them, are
    those of the prompt and the generation, without the tokens whose experts are known and the last
    one, which the model has not read.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    experts: np.ndarray | None = None


class EngineError(UserError, RuntimeError):
    """The engine cannot serve a request: too long, queue full, engine closed or server down."""


def check_request(request: Request, max_length: int, vocab_size: int | None) -> int:
    """The number of tokens to generate; EngineError for a request that can never be served.

    `vocab_size` None: the model's vocabulary is not known.
    """
    ids, how = request.prompt_ids, request.sampling
    room = max_length - len(ids)
    problem = None
    if how.max_tokens < 1:
        problem = f"max_tokens must be at least 1, got {how.max_tokens}"
    elif how.temperature < 0 or how.top_k < 0:
        problem = f"temperature and top_k must be >= 0, got {how.temperature} and {how.top_k}"
    elif not 0 < how.top_p <= 1 or not 0 <= how.min_p <= 1:
        problem = f"top_p must be in (0, 1] and min_p in [0, 1], got {how.top_p} and {how.min_p}"
    elif not ids:
        problem = "the prompt is empty"
    elif room < 1:
        problem = (
            f"the prompt has {len(ids)} tokens; max_length = {max_length} leaves no room for a "
            "generation"
        )
    elif vocab_size is not None and not 0 <= min(ids) <= max(ids) < vocab_size:
        problem = f"prompt ids must be in 0..{vocab_size - 1}, got {min(ids)}..{max(ids)}"
    if problem is not None:
        raise EngineError(f"session {request.session!r}: {problem}")
    return min(how.max_tokens, room)


def check_generation(generation: Generation, sampling: Sampling) -> None:
    """Raises EngineError for a generation that cannot be trained on."""
    tokens = len(generation.token_ids)
    if generation.finish_reason == "cancelled":
        raise EngineError("the engine cancelled the generation")
    if not 0 < tokens <= sampling.max_tokens:
        raise EngineError(f"the engine gave {tokens} tokens, asked for 1..{sampling.max_tokens}")
    if len(generation.log_probs) != tokens or len(generation.versions) != tokens:
        raise EngineError(
            f"the engine gave {tokens} tokens, {len(generation.log_probs)} log-probs and "
            f"{len(generation.versions)} versions"
        )
    if not all(map(math.isfinite, generation.log_probs)):
        raise EngineError("the engine gave a log-prob that is not finite")


class Engine(Protocol):
    """Thread-safe. `submit` returns immediately; cancelling its future cancels the generation."""

    on_learner_device: ClassVar[bool]
    """Whether the engine keeps its weights and cache on the learner's devices."""

    @property
    def version(self) -> int:
        """The weight version with which a request submitted now starts."""

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a prompt and its generation together."""

    def submit(self, request: Request) -> "Future[Generation]": ...

    def release(self, session: str) -> None:
        """Ends a session; the engine may drop its cache."""

    def update_weights(self, params: Any, version: int) -> None:
        """Sets the weights for all tokens generated from now on."""

    def metrics(self) -> dict[str, float]:
        """Gauges, and counters since the start.

        `queue_length` (requests that wait) and `kv_usage` (share of the KV cache in use) limit the
        number of episodes in flight, if the engine has them.
        """

    def close(self) -> None: ...
