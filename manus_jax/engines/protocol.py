"""What the agent asks of an engine: tokens in, tokens out, and which weights made each.

An engine is shared by all episodes. A request carries the whole token stream of its episode; the
session tells the engine whose stream it is, so that the keys and values of what it has already
seen need not be computed again. Results never depend on what else is being generated.
"""

import dataclasses
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, Protocol

from manus_jax.errors import UserError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Request:
    """`prompt_ids` is everything the episode holds so far; `seed` fixes what is sampled."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    session: str


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was sampled: ids (the stop token included), log-probs of the distribution that was
    sampled from (after temperature, top-p, top-k, min-p), and the weight version of each token.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason


class EngineError(UserError, RuntimeError):
    """A request that the engine cannot serve: too long, queue full, closed, or a dead server."""


class Engine(Protocol):
    """Thread-safe. `submit` returns at once; cancelling its future cancels the generation."""

    accepts_streamed_tensors: ClassVar[bool]
    """Whether `params` may hold tensors that are read one at a time (weights/host_tensors.py)."""

    @property
    def version(self) -> int:
        """The number of the weights that requests submitted now will start with."""

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its generation may have together."""

    def submit(self, request: Request) -> "Future[Generation]": ...

    def release(self, session: str) -> None:
        """The session's episode has ended: what is kept for it may go."""

    def update_weights(self, params: Any, version: int) -> None:
        """New weights for every token generated from now on."""

    def metrics(self) -> dict[str, float]:
        """What goes on now, and what was done since the start."""

    def close(self) -> None: ...
