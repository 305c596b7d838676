"""The agent that plays with a language model: exact tokens in, exact tokens out.

The token stream of an episode is append-only. The opening is tokenized once; sampled tokens are
appended unchanged, followed by the tokens that the chat template inserts before the next turn.
Sampled tokens are decoded for the parser but never re-encoded. With bounded memory, the stream
forks: a new segment starts with a new opening and the tokens of the kept turns. It also forks where
the chat template removes thoughts from earlier turns, if that is to be followed (`chat.thinking`);
the new prompt is then what the template writes.
"""

import contextlib
import functools
import hashlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from manus_jax.agentgym.table import environment
from manus_jax.config.settings import ChatSettings, RolloutSettings
from manus_jax.data.chat import ChatStream, Message, ToolSchemas
from manus_jax.data.tasks import Task
from manus_jax.engines.protocol import (
    Engine,
    EngineError,
    Generation,
    Request,
    Sampling,
    check_generation,
)
from manus_jax.engines.usage import UsageClock
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.player import Answer, EndEpisode, EpisodeContext
from manus_jax.rollout.prompts import TurnPrompt, cut_middle, opening, rejoined
from manus_jax.rollout.token_stream import TokenStream
from manus_jax.rollout.trajectory import Segment, Turn
from manus_jax.status import STATUS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from manus_jax.rollout.endpoint.server import Endpoint

_log = logging.getLogger(__name__)
_OPENINGS = 256  # that are kept as tokens


def turn_seed(run_seed: int, uid: str, turn: int) -> int:
    """The 31-bit seed of one turn; equal on all machines and in all processes."""
    digest = hashlib.sha256(f"{run_seed}/{turn}/{uid}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


class ChatTokenizer:
    """A tokenizer and its chat template, thread-safe."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", settings: ChatSettings | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatStream(tokenizer, settings)
        self.follows_template = self._chat.follows_template
        self.opens_thought = self._chat.opens_thought
        # Tokenizers that are not thread-safe set truncation and padding in every call.
        self._lock: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext() if self._chat.thread_safe else threading.Lock()
        )
        # The episodes of a group have the same opening.
        self._start = functools.lru_cache(_OPENINGS)(lambda m: tuple(self._chat.start(m)))
        eos = tokenizer.eos_token_id
        ends = {self._chat.stop_id} | (set() if eos is None else {eos})
        self.stop_ids = tuple(sorted(ends))
        self._tool_role: str | None = None

    def start(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> tuple[int, ...]:
        with self._lock:
            if tools or any(message.tool_calls for message in messages):
                return tuple(self._chat.start(messages, tools))
            return self._start(tuple(messages))

    def extend(self, sampled: Sequence[int], *messages: Message) -> list[int]:
        with self._lock:
            return self._chat.extend(sampled, messages)

    def follow(
        self,
        history: Sequence[Message],
        sampled: Sequence[int],
        messages: Sequence[Message],
        tools: ToolSchemas,
    ) -> tuple[list[int], bool]:
        with self._lock:
            return self._chat.follow(history, sampled, messages, tools)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters that one token may stand for, at most."""
        return max(map(len, self._tokenizer.get_vocab()))

    @functools.cached_property
    def end_of_thought(self) -> list[int]:
        """The ids that end an open thought."""
        with self._lock:
            return self._tokenizer("\n</think>\n\n", add_special_tokens=False)["input_ids"]

    def reply_role(self, tools: ToolSchemas) -> str:
        """The role of the environment's replies to valid turns."""
        if not tools:
            return "user"
        if self._tool_role is None:
            with self._lock:
                self._tool_role = self._chat.reply_role(tools)
        return self._tool_role

    def check(self, env: str, settings: RolloutSettings) -> None:
        """Raises ChatTemplateError if the template cannot render this environment's turns."""
        action_format = format_for(environment(env), settings.action_format)
        first = opening(Task(env, 0, f"{env}_0"), action_format, settings)
        self.start(first.messages("An observation."), action_format.tools)
        for role in ("user", self.reply_role(action_format.tools)):
            self.extend((), Message(role, "An observation."))

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


class EngineAgent:
    """Plays with an engine; one instance for all episodes. `seed` determines the samples."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int = 0,
        chat: ChatSettings | None = None,
    ) -> None:
        self._engine = engine
        self._seed = seed
        self._chat_tokenizer = ChatTokenizer(tokenizer, chat)
        self.usage = UsageClock()
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None

    def check(self, env: str, settings: RolloutSettings) -> None:
        """Accepts every environment that the model's chat template can render."""
        self._chat_tokenizer.check(env, settings)

    def player(self, context: EpisodeContext) -> "LLMPlayer":
        return LLMPlayer(self._engine, self._chat_tokenizer, context, self._seed, self.usage)

    def endpoint(self) -> "Endpoint":
        """The model behind OpenAI's chat API, started at the first call."""
        from manus_jax.rollout.endpoint.server import Endpoint

        with self._lock:
            if self._endpoint is None:
                self._endpoint = Endpoint(
                    self._engine, self._chat_tokenizer, self.usage, self._seed
                )
            return self._endpoint

    def close(self) -> None:
        """Ends the endpoint; the engine stays open."""
        with self._lock:
            if self._endpoint is not None:
                self._endpoint.close()


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
        self._streams: list[TokenStream] = []
        self._observations: list[Message] = []  # index n: before turn n
        self._texts: list[str] = []  # of each turn
        self._sampled: list[tuple[int, ...]] = []  # the tokens of each turn
        self._replies: list[list[int]] = []  # the tokens between a turn and the next
        self._previous: TokenStream | None = None  # of the latest turn
        self.prompts_extended = 0
        self.prompts_forked = 0

    def observe(
        self, observation: str, replies: bool = False, prompt: TurnPrompt | None = None
    ) -> str:
        # A server's JSON can hold lone surrogates, which tokenizers reject.
        whole = observation.encode("utf-8", "replace").decode("utf-8")
        text = self._chat_tokenizer.shortened(whole, self._settings.max_observation_tokens)
        tools = self._context.action_format.tools if replies else ()
        message = Message(self._chat_tokenizer.reply_role(tools), text)
        self._observations.append(message)
        if prompt is not None:
            schemas = self._context.action_format.tools
            self._fork(self._chat_tokenizer.start([Message("user", prompt(text))], schemas))
            return text
        if not self._sampled:
            self._fork(self._start(text))
            return text
        kept = self._settings.memory_turns
        forgets = kept is not None and len(self._sampled) > kept
        if self._chat_tokenizer.follows_template:
            self._follow_template(forgets)
            return text
        self._replies.append(self._chat_tokenizer.extend(self._sampled[-1], message))
        if forgets:
            self._fork(self._remembered())
        else:
            self._streams[-1].add_given(self._replies[-1])
        return text

    def act(self, turn: int) -> Answer:
        stream = self._streams[-1]
        prompt = stream.ids
        if self._previous is not None:
            seen = () if self._previous is stream else self._previous.ids
            extends = prompt[: len(seen)] == seen
            self.prompts_extended += extends
            self.prompts_forked += not extends
        generation, forced = self._sample_turn(stream, turn)
        self._previous = stream
        self._sampled.append(stream.since(len(prompt)))
        text = self._chat_tokenizer.decode(self._sampled[-1])
        if self._chat_tokenizer.opens_thought:  # in the prompt, where parsers do not see it
            text = f"<think>\n{text}"
        self._texts.append(text)
        return Answer(
            text=text,
            cut=generation.finish_reason == "length",
            segment=len(self._streams) - 1,
            start=len(prompt),
            stop=len(stream),
            forced=forced,
        )

    def segments(self) -> tuple[Segment, ...]:
        return tuple(
            segment for stream in self._streams if (segment := stream.frozen()) is not None
        )

    def fork(self, context: EpisodeContext, number: int, turn: Turn) -> "LLMPlayer":
        """A player for another episode, in the state before turn `number`, which was `turn`.

        It continues the exact tokens of that turn's prompt, all of which are context to it.
        """
        other = LLMPlayer(self._engine, self._chat_tokenizer, context, self._seed, self._usage)
        other._streams = [TokenStream(self._streams[turn.segment].ids[: turn.start])]
        other._observations = self._observations[: number + 1]
        other._texts = self._texts[:number]
        other._sampled = self._sampled[:number]
        other._replies = self._replies[:number]
        return other

    def close(self) -> None:
        if self._streams:
            self._release()

    def _start(self, observation: str) -> tuple[int, ...]:
        messages = self._context.opening.messages(observation)
        return self._chat_tokenizer.start(messages, self._context.action_format.tools)

    def _remembered(self) -> list[int]:
        """A prompt with a new opening and the tokens of the remembered turns."""
        left_out, observation = self._left_out()
        ids = [*self._start(observation)]
        for turn in range(left_out, len(self._sampled)):
            ids += self._sampled[turn]
            ids += self._replies[turn]
        return ids

    def _left_out(self) -> tuple[int, str]:
        """The number of turns that memory leaves out, and the observation of the new opening."""
        first, kept = self._observations[0].content, self._settings.memory_turns
        left_out = 0 if kept is None else max(0, len(self._sampled) - kept)
        if not left_out:
            return 0, first
        return left_out, rejoined(first, left_out, self._observations[left_out].content)

    def _follow_template(self, forgets: bool) -> None:
        """Continues the stream, or starts another if the template rewrites the history."""
        left_out, observation = self._left_out()
        history = list(self._context.opening.messages(observation))
        for turn in range(left_out, len(self._texts)):
            history += [Message("assistant", self._texts[turn]), self._observations[turn + 1]]
        *history, newest = history
        tools = self._context.action_format.tools
        if forgets:
            self._fork(self._chat_tokenizer.start([*history, newest], tools))
            return
        ids, forks = self._chat_tokenizer.follow(history, self._sampled[-1], [newest], tools)
        if forks:
            self._fork(ids)
        else:
            self._streams[-1].add_given(ids)

    def _fork(self, ids: Sequence[int]) -> None:
        if self._streams:
            self._release()
        self._streams.append(TokenStream(ids))

    @property
    def _session(self) -> str:
        return f"{self._context.spec.uid}/{self._context.attempt}/{len(self._streams) - 1}"

    def _release(self) -> None:
        try:
            self._engine.release(self._session)
        except EngineError as error:  # the only effect: the engine's cache is not freed
            _log.warning("%s was not released: %s", self._session, error)

    def _sample_turn(self, stream: TokenStream, turn: int) -> tuple[Generation, int]:
        """Adds a turn to the stream; returns its last generation and the number of forced tokens.

        A thought that is open after `thinking_tokens` tokens is ended with tokens that the model
        did not sample and that are not trained on; the turn then continues.
        """
        settings, start = self._settings, len(stream)
        room = min(settings.max_total_tokens, self._engine.max_length) - start
        most = min(settings.max_tokens_per_turn, room)
        if most < min(settings.min_turn_tokens, settings.max_tokens_per_turn):
            raise EndEpisode("context")
        uid, budget = self._context.spec.uid, settings.thinking_tokens
        end = self._chat_tokenizer.end_of_thought if budget is not None else []
        if budget is None or most <= budget + len(end):
            generation = self._generate(stream, most, turn_seed(self._seed, uid, turn))
            stream.add_sampled(generation, turn)
            return generation, 0
        generation = self._generate(stream, budget, turn_seed(self._seed, uid, turn))
        stream.add_sampled(generation, turn)
        if generation.finish_reason != "length":
            return generation, 0
        text = self._chat_tokenizer.decode(generation.token_ids)
        opened = self._chat_tokenizer.opens_thought or "<think>" in text
        if not opened or "</think>" in text:
            end = []
        stream.add_given(end)
        seed = turn_seed(self._seed, f"{uid}/answer", turn)
        generation = self._generate(stream, start + most - len(stream), seed)
        stream.add_sampled(generation, turn)
        return generation, len(end)

    def _generate(self, stream: TokenStream, most: int, seed: int) -> Generation:
        settings = self._settings
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=most,
            stop_ids=self._chat_tokenizer.stop_ids,
        )
        request = Request(stream.ids, sampling, seed, self._session, stream.known_experts)
        with self._usage.request(), STATUS.working("waiting for the engine"):
            future = self._engine.submit(request)
            generation = self._context.cancellation.result(future, settings.generation_timeout)
        check_generation(generation, sampling)
        return generation
