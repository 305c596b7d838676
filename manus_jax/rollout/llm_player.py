"""The agent that plays with a language model: exact tokens in, exact tokens out.

The token stream of an episode is append-only. The opening is tokenized once; sampled tokens are
appended unchanged, followed by the tokens that the chat template inserts before the next turn.
Sampled tokens are decoded for the parser but never re-encoded. With bounded memory, the stream
forks: a new segment starts with a new opening and the tokens of the kept turns.
"""

import dataclasses
import hashlib
import logging
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.data.chat import ChatStream, Message
from manus_jax.data.tasks import Task
from manus_jax.engines.protocol import Engine, EngineError, Generation, Request, Sampling
from manus_jax.engines.usage import UsageClock
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.player import Answer, EndEpisode, EpisodeContext
from manus_jax.rollout.prompts import cut_middle, opening, rejoined
from manus_jax.rollout.trajectory import Segment
from manus_jax.status import STATUS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


def turn_seed(run_seed: int, uid: str, turn: int) -> int:
    """The 31-bit seed of one turn; equal on all machines and in all processes."""
    digest = hashlib.sha256(f"{run_seed}/{turn}/{uid}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


class ChatTokenizer:
    """A tokenizer and its chat template, thread-safe."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._chat = ChatStream(tokenizer)
        # Every tokenizer call sets truncation and padding state, so calls must not overlap.
        self._lock = threading.Lock()
        eos = tokenizer.eos_token_id
        ends = {self._chat.stop_id} | (set() if eos is None else {eos})
        self.stop_ids = tuple(sorted(ends))

    def start(self, messages: Sequence[Message]) -> list[int]:
        with self._lock:
            return self._chat.start(messages)

    def extend(self, sampled: Sequence[int], text: str) -> list[int]:
        with self._lock:
            return self._chat.extend(sampled, [Message("user", text)])

    def check(self, env: str, settings: RolloutSettings) -> None:
        """Raises ChatTemplateError if the template cannot render this environment's turns."""
        action_format = format_for(environment(env), settings.action_format)
        first = opening(Task(env, 0, f"{env}_0"), action_format, settings)
        self.start(first.messages("An observation."))
        self.extend((), "An observation.")

    def decode(self, ids: Sequence[int]) -> str:
        with self._lock:
            return self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )

    def shortened(self, text: str, limit: int) -> str:
        """Removes text from the middle until at most `limit` tokens, or no text, remain."""
        if len(text.encode()) <= limit:  # no tokenizer produces more tokens than bytes
            return text
        kept, cut = len(text), text
        while kept and (tokens := self._count(cut)) > limit:
            kept = int(0.95 * kept * limit / tokens)
            cut = cut_middle(text, kept)
        return cut

    def _count(self, text: str) -> int:
        with self._lock:
            return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclasses.dataclass
class _Stream:
    """A segment under construction."""

    ids: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    turn_ids: list[int] = dataclasses.field(default_factory=list)

    def add_given(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.log_probs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.turn_ids += [-1] * len(ids)

    def add_sampled(self, generation: Generation, turn: int) -> None:
        self.ids += generation.token_ids
        self.log_probs += generation.log_probs
        self.versions += generation.versions
        self.turn_ids += [turn] * len(generation.token_ids)

    def frozen(self) -> Segment:
        """The tokens up to the last sampled one; empty if there is none."""
        turn_ids = np.array(self.turn_ids, np.int32)
        end = int(np.flatnonzero(turn_ids >= 0).max(initial=-1)) + 1
        return Segment(
            token_ids=np.array(self.ids[:end], np.int32),
            loss_mask=turn_ids[:end] >= 0,
            log_probs=np.array(self.log_probs[:end], np.float32),
            versions=np.array(self.versions[:end], np.int32),
            turn_ids=turn_ids[:end],
        )


class EngineAgent:
    """Plays with an engine; one instance for all episodes. `seed` determines the samples."""

    def __init__(self, engine: Engine, tokenizer: "PreTrainedTokenizerBase", seed: int = 0) -> None:
        self._engine = engine
        self._seed = seed
        self._chat_tokenizer = ChatTokenizer(tokenizer)
        self.usage = UsageClock()

    def check(self, env: str, settings: RolloutSettings) -> None:
        """Accepts every environment that the model's chat template can render."""
        self._chat_tokenizer.check(env, settings)

    def player(self, context: EpisodeContext) -> "LLMPlayer":
        return LLMPlayer(self._engine, self._chat_tokenizer, context, self._seed, self.usage)


class LLMPlayer:
    """Plays one attempt at an episode, in one thread."""

    def __init__(
        self,
        engine: Engine,
        chat_tokenizer: ChatTokenizer,
        context: EpisodeContext,
        seed: int,
        usage: UsageClock,
    ) -> None:
        self._engine = engine
        self._usage = usage
        self._chat_tokenizer = chat_tokenizer
        self._context = context
        self._seed = seed
        self._settings = context.settings
        self._streams: list[_Stream] = []
        self._observations: list[str] = []  # index n: before turn n
        self._sampled: list[tuple[int, ...]] = []  # the tokens of each turn
        self._replies: list[list[int]] = []  # the tokens between a turn and the next
        self._previous: list[int] = []  # the latest prompt and the tokens sampled from it
        self.prompts_extended = 0
        self.prompts_forked = 0

    def observe(self, observation: str) -> str:
        # A server's JSON can hold lone surrogates, which tokenizers reject.
        whole = observation.encode("utf-8", "replace").decode("utf-8")
        text = self._chat_tokenizer.shortened(whole, self._settings.max_observation_tokens)
        self._observations.append(text)
        if not self._sampled:
            self._fork(self._chat_tokenizer.start(self._context.opening.messages(text)))
            return text
        self._replies.append(self._chat_tokenizer.extend(self._sampled[-1], text))
        kept = self._settings.memory_turns
        if kept is not None and len(self._sampled) > kept:
            self._fork(self._remembered(kept))
        else:
            self._streams[-1].add_given(self._replies[-1])
        return text

    def act(self, turn: int) -> Answer:
        stream = self._streams[-1]
        prompt = list(stream.ids)
        if self._previous:
            extends = prompt[: len(self._previous)] == self._previous
            self.prompts_extended += extends
            self.prompts_forked += not extends
        generation = self._generate(prompt, turn)
        stream.add_sampled(generation, turn)
        self._previous = list(stream.ids)
        self._sampled.append(generation.token_ids)
        return Answer(
            text=self._chat_tokenizer.decode(generation.token_ids),
            cut=generation.finish_reason == "length",
            segment=len(self._streams) - 1,
            start=len(prompt),
            stop=len(stream.ids),
        )

    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment for stream in self._streams if len(segment := stream.frozen()))

    def close(self) -> None:
        if self._streams:
            self._release()

    def _remembered(self, kept: int) -> list[int]:
        """A prompt with a new opening and the tokens of the last `kept` turns."""
        left_out = len(self._sampled) - kept
        observation = rejoined(self._observations[0], left_out, self._observations[left_out])
        ids = self._chat_tokenizer.start(self._context.opening.messages(observation))
        for turn in range(left_out, len(self._sampled)):
            ids += self._sampled[turn]
            ids += self._replies[turn]
        return ids

    def _fork(self, ids: list[int]) -> None:
        if self._streams:
            self._release()
        self._streams.append(_Stream())
        self._streams[-1].add_given(ids)

    @property
    def _session(self) -> str:
        return f"{self._context.spec.uid}/{self._context.attempt}/{len(self._streams) - 1}"

    def _release(self) -> None:
        try:
            self._engine.release(self._session)
        except EngineError as error:  # the only effect: the engine's cache is not freed
            _log.warning("%s was not released: %s", self._session, error)

    def _generate(self, prompt: list[int], turn: int) -> Generation:
        settings = self._settings
        room = min(settings.max_total_tokens, self._engine.max_length) - len(prompt)
        most = min(settings.max_tokens_per_turn, room)
        if most < min(settings.min_turn_tokens, settings.max_tokens_per_turn):
            raise EndEpisode("context")
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=most,
            stop_ids=self._chat_tokenizer.stop_ids,
        )
        seed = turn_seed(self._seed, self._context.spec.uid, turn)
        request = Request(tuple(prompt), sampling, seed, self._session)
        with self._usage.request(), STATUS.working("waiting for the engine"):
            future = self._engine.submit(request)
            generation = self._context.cancellation.result(future, settings.generation_timeout)
        _check(generation, sampling)
        return generation


def _check(generation: Generation, sampling: Sampling) -> None:
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
