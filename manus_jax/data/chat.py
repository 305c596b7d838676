"""Conversations as exact token ids, rendered with the model's own chat template.

The ids are append-only. A prompt is the text that the template adds after the previous turn,
tokenized separately and appended; an assistant turn is what the model samples, up to and including
its end-of-turn token. The ids used for training are therefore the ids that the sampler consumes and
produces, and nothing is decoded and re-encoded. A rollout uses `ChatStream.start` and `extend`;
supervised training uses `ChatStream.encode`, which concatenates the same pieces.

Some templates remove thoughts from earlier turns. With `chat.thinking = "strip"`, prompts follow
the template: where it rewrites the history, a new sequence starts (`follow`, `encode`). Otherwise
earlier turns stay as they are. Not supported: images, and escaping of control tokens in message
text, which the tokenizer reads as control tokens.
"""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from manus_jax.config.settings import ChatSettings
from manus_jax.data.chat_template import ChatTemplateError as ChatTemplateError
from manus_jax.data.chat_template import (
    template_arguments,
    template_variables,
    with_fixed_date,
)
from manus_jax.data.tool_calls import (
    ToolCall,
    ToolCallError,
    calls_from_records,
    parse_tool_calls,
    render_tool_call,
)
from manus_jax.errors import UserError

if TYPE_CHECKING:  # modules that only need Message should not pay for this import
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

ROLES = {"human": "user", "env": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}
"""Maps role names in data to role names in chat templates."""

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Placeholder for a sampled turn; the text must survive trimming and not occur in any template.
_SAMPLED = "sampled9f3b7c"
_PLACEHOLDER = [{"role": "user", "content": "user"}, {"role": "assistant", "content": _SAMPLED}]
_REPLY = "reply9f3b7c"


ToolSchemas = Sequence[dict[str, Any]]
"""Descriptions of tools in OpenAI's form, for templates that show them to the model."""


class ConversationError(UserError, ValueError):
    """A conversation is malformed or has no turn to train on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message; `train` marks assistant messages whose tokens are trained on."""

    role: str
    content: str
    train: bool = False
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def text(self) -> str:
        """The content and the tool calls."""
        return "\n".join(filter(None, [self.content, *map(render_tool_call, self.tool_calls)]))


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedConversation:
    """`turn_ends`: last token index of each assistant turn, starting at the first trained turn."""

    input_ids: np.ndarray  # int32 [length]
    loss_mask: np.ndarray  # bool [length]: True on trained tokens
    turn_ends: tuple[int, ...]


def message_from_record(record: dict[str, Any]) -> Message:
    """Reads `{"from", "value", "loss"}` (AgentGym, OpenManus) or `{"role", "content"}`.

    Assistant messages are trained on unless `loss` is false; other messages never are. They may
    have `tool_calls` in OpenAI's form.
    """
    if not isinstance(record, dict):
        raise ConversationError(f"a message must be an object, got {type(record).__name__}")
    who, what = ("from", "value") if "from" in record else ("role", "content")
    name, content = record.get(who), record.get(what)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ConversationError(
            f"unknown role {name!r} under {who!r} (known: {', '.join(ROLES)})"
            if name is not None
            else f"a message needs a role under 'role' or 'from'; its keys are {list(record)}"
        )
    calls: tuple[ToolCall, ...] = ()
    if record.get("tool_calls"):
        try:
            calls = calls_from_records(record["tool_calls"])
        except (ToolCallError, TypeError) as error:
            raise ConversationError(f"'tool_calls': {error}") from None
        content = content or ""
    if not isinstance(content, str):
        raise ConversationError(f"a message needs text under {what!r}, got {content!r}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ConversationError(f"the text under {what!r} is not valid Unicode: {error}") from None
    loss = record.get("loss")
    if loss not in (None, False, True):  # 0 and 1 are equal to them
        raise ConversationError(f"'loss' must be true, false or null, got {loss!r}")
    return Message(role, content, role == "assistant" and loss in (None, True), calls)


class ChatStream:
    """Encodes conversations turn by turn with one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", settings: ChatSettings | None = None):
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ChatTemplateError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; "
                "use an instruction-tuned model, or add chat_template.jinja to its directory"
            )
        settings = settings or ChatSettings()
        self._tokenizer = tokenizer
        self._arguments = template_arguments(template, settings)
        self._templates = {  # a tokenizer may have another one for prompts with tools
            shows_tools: with_fixed_date(
                tokenizer.get_chat_template(tools=[{}] if shows_tools else None)
            )
            for shows_tools in (False, True)
        }
        self.follows_template = settings.thinking == "strip"
        """Whether earlier turns are shown as the template rewrites them (see `follow`)."""
        self._thinks = settings.thinking != "off"
        tail = self._after_sampled([], add_generation_prompt=False)
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        found = [(tail.index(token), -len(token), token) for token in special if token in tail]
        if not found:
            raise ChatTemplateError(
                f"the chat template ends an assistant turn with {tail!r}, which has no special "
                "token that the model could sample to end its turn"
            )
        start, _, token = min(found)
        self._stop_text, self._after_stop = tail[: start + len(token)], tail[start + len(token) :]
        self.stop_id: int = tokenizer.convert_tokens_to_ids(token)
        """The end-of-turn token; a sampler must stop on it."""
        plain, prompt = (self._render([_PLACEHOLDER[:1]], wanted)[0] for wanted in (False, True))
        self._header = prompt.removeprefix(plain)
        self._backend = _plain_backend(tokenizer)

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may use this object and its tokenizer at the same time.

        They may not use the tokenizer elsewhere with truncation or padding, which it remembers.
        """
        return self._backend is not None

    @property
    def opens_thought(self) -> bool:
        """Whether the template starts a thought in the prompt, so that a turn continues it."""
        return self._header.rstrip().endswith("<think>")

    def start(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        """Ids of the first prompt, including the header of the assistant turn."""
        return self._tokenize_one(self._render([_as_dicts(messages)], True, tools)[0])

    def extend(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids to append after the turn `sampled` and `messages`, up to the next assistant turn.

        If the sampled turn was truncated before its end-of-turn token, the result starts with that
        token. The model did not sample it, so it must not be trained on.
        """
        if not messages:
            raise ConversationError("extend needs the messages that follow the sampled turn")
        rest = self._following(_as_dicts(messages), add_generation_prompt=True)
        ended = len(sampled) > 0 and sampled[-1] == self.stop_id
        return self._tokenize_one(rest if ended else self._stop_text + rest)

    def follow(
        self,
        history: Sequence[Message],
        sampled: Sequence[int],
        messages: Sequence[Message],
        tools: ToolSchemas = (),
    ) -> tuple[list[int], bool]:
        """The next prompt as the template writes it, if it rewrites thoughts of earlier turns.

        `history` ends with the turn whose tokens are `sampled`; `messages` follow it. Returns the
        ids to append and False if the new prompt starts with the last one and the turn, and
        otherwise all ids of the new prompt and True. A turn without thoughts is always extended:
        what else a template changes, such as white space, does not matter.
        """
        turn = self._tokenizer.decode(list(sampled), skip_special_tokens=False)
        if "</think>" in self._header + turn:
            chat = _as_dicts(history)
            done = self._render([chat[:-1]], True, tools)[0] + turn
            prompt = self._render([chat + _as_dicts(messages)], True, tools)[0]
            if not prompt.startswith(done):
                return self._tokenize_one(prompt), True
        return self.extend(sampled, messages), False

    def encode(
        self, messages: Sequence[Message], name: str = "conversation", tools: ToolSchemas = ()
    ) -> list[EncodedConversation]:
        """Tokens and loss mask of a whole conversation, split into turns as in a rollout.

        Everything before the first trained turn is one prompt, as from `start`. The mask covers
        what the model samples: the text of a trained turn, as the template writes it in the last
        turn, and its end-of-turn token, but not what the template writes after it. Where the
        template rewrites earlier turns, another sequence starts if it is to be followed (`follow`);
        every turn is trained in one of the sequences. Thoughts are left out if thinking is off.
        `name` identifies the conversation in errors.
        """
        if not self._thinks:
            messages = [_without_thought(message) for message in messages]
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        trained = [i for i in turns if messages[i].train]
        if not trained:
            what = "to train on (all have loss false)" if turns else f"in {len(messages)} messages"
            raise ConversationError(f"{name} has no assistant turn {what}")
        if trained[0] == 0:
            raise ConversationError(
                f"{name} starts with an assistant turn; a prompt must precede it"
            )
        turns = turns[turns.index(trained[0]) :]
        chat = _as_dicts(messages)
        prompts = self._render([chat[:i] for i in turns], True, tools)
        wholes = self._render([chat[: i + 1] for i in turns], False, tools)
        if turns[-1] != len(messages) - 1:
            prompts += self._render([chat], False, tools)

        sequences: list[list[tuple[str, bool]]] = [[(prompts[0], False)]]
        done = prompts[0]  # the text of the sequence, if the template writes it in one go
        for number, i in enumerate(turns):
            prompt, whole = prompts[number], wholes[number]
            if not whole.startswith(prompt) or not whole.endswith(
                self._stop_text + self._after_stop
            ):
                raise ChatTemplateError(
                    f"{name}: the chat template does not render message {i} (assistant) as its "
                    f"prompt, its text and {self._stop_text!r}: {whole[-60:]!r}"
                )
            said = whole[len(prompt) : len(whole) - len(self._after_stop)]
            sequences[-1].append((said, messages[i].train))
            done += said
            if number + 1 == len(prompts):
                break
            following = prompts[number + 1]
            if following.startswith(done):
                added = following[len(done) :]
            elif self.follows_template:
                sequences.append([])
                added, done = following, ""
            else:
                last = number + 1 == len(turns)
                to = len(messages) if last else turns[number + 1]
                added = self._following(chat[i + 1 : to], add_generation_prompt=not last)
            sequences[-1].append((added, False))
            done += added
        return [self._tokens(pieces) for pieces in sequences if any(t for _, t in pieces)]

    def _tokens(self, pieces: Sequence[tuple[str, bool]]) -> EncodedConversation:
        """Prompts and turns, which alternate, with whether they are trained."""
        ids = self._tokenize([text for text, _ in pieces])
        ends = np.cumsum([len(piece) for piece in ids])
        return EncodedConversation(
            input_ids=np.array([i for piece in ids for i in piece], np.int32),
            loss_mask=np.repeat([train for _, train in pieces], [len(piece) for piece in ids]),
            turn_ends=tuple(int(end) - 1 for end in ends[1::2]),
        )

    def reply_role(self, tools: ToolSchemas) -> str:
        """The role of replies to tool calls: "tool" if the template has it, else "user".

        Raises ChatTemplateError if the template does not show tools to the model, or if its calls
        are in a syntax that `parse_tool_calls` does not read.
        """
        if "tools" not in template_variables(self._tokenizer.chat_template):
            raise ChatTemplateError(
                "the chat template does not show tools to the model; use a model whose template "
                "does, another rollout.action_format, or requests without tools"
            )
        user, call = Message("user", "user"), ToolCall("sampled", {"text": _SAMPLED})
        asked = _as_dicts([user, Message("assistant", "", tool_calls=(call,))])
        prompt, whole = self._render([asked[:1]], True, tools), self._render([asked], False, tools)
        written = whole[0].removeprefix(prompt[0]).partition(self._stop_text)[0]
        try:
            read = parse_tool_calls(written.rpartition("</think>")[2])[1]
        except ToolCallError:
            read = ()
        if read != (call,):
            raise ChatTemplateError(
                f"the chat template writes tool calls in an unknown syntax: {written!r}"
            )
        try:
            replied = self._render([[*asked, {"role": "tool", "content": _REPLY}]], True, tools)
        except ChatTemplateError:
            return "user"
        return "tool" if _REPLY in replied[0] else "user"

    def _following(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """What the template writes after the end-of-turn token of a turn that `messages` follow."""
        rest = self._after_sampled(messages, add_generation_prompt)
        if not rest.startswith(self._stop_text):
            raise ChatTemplateError(
                f"the chat template ends the last assistant turn with {self._stop_text!r}, but "
                f"continues with {rest[:40]!r} when a {messages[0]['role']} message follows"
            )
        return rest[len(self._stop_text) :]

    def _after_sampled(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        # Rendered after a placeholder: a rollout keeps what it sampled even if the template would
        # rewrite it later, and the cost does not grow with the length of the episode.
        text = self._render([_PLACEHOLDER + messages], add_generation_prompt)[0]
        _, found, rest = text.partition(_SAMPLED)
        if not found:
            raise ChatTemplateError(f"the chat template omits the assistant turn: {text!r}")
        return rest

    def _render(
        self,
        chats: list[list[dict[str, Any]]],
        add_generation_prompt: bool,
        tools: ToolSchemas = (),
    ) -> list[str]:
        try:
            return self._tokenizer.apply_chat_template(
                chats,
                chat_template=self._templates[bool(tools)],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._arguments,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            roles = [message["role"] for message in chats[-1]]
            raise ChatTemplateError(f"the chat template rejects roles {roles}: {error}") from error

    def _tokenize_one(self, text: str) -> list[int]:
        # A batch of one text would be passed to the threads of the tokenizer's pool.
        backend = self._backend
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return self._tokenize([text])[0]
        return backend.encode(text, add_special_tokens=False).ids

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"]


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    out_dir: str | os.PathLike[str] | None = None,
    phrases: bool = False,
) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE tokenizer with a ChatML template on `texts`, without downloads.

    The result is deterministic. The vocabulary is smaller than `vocab_size` if the texts have no
    more pairs to merge. With `phrases`, a token may be a whole sentence; digits and line ends are
    tokens of their own. A tokenizer saved to `out_dir` loads with AutoTokenizer and vLLM.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END_OF_TEXT, START_OF_TURN, END_OF_TURN]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + len(special):
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {len(alphabet)} bytes and {len(special)} "
            f"special tokens need {len(alphabet) + len(special)}"
        )
    tokenizer = Tokenizer(models.BPE())
    if phrases:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"<\|\w+\|>|[\d\n]"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=END_OF_TEXT,
        eos_token=END_OF_TURN,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    if out_dir is not None:
        fast.save_pretrained(out_dir)
    return fast


def _without_thought(message: Message) -> Message:
    if message.role != "assistant" or "</think>" not in message.content:
        return message
    answer = message.content.rpartition("</think>")[2].lstrip("\n")
    return dataclasses.replace(message, content=answer)


def _plain_backend(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """The Rust tokenizer, if `tokenizer(text)` does nothing but call it; else None.

    Its truncation and padding are turned off here, as the first call of `tokenizer` would do. Later
    calls then change no state.
    """
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if (
        not isinstance(tokenizer, plain)
        or kind.__call__ is not plain.__call__
        or kind._encode_plus is not plain._encode_plus
        or tokenizer.split_special_tokens
    ):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [
        {"role": message.role, "content": message.content}
        | ({"tool_calls": [c.record() for c in message.tool_calls]} if message.tool_calls else {})
        for message in messages
    ]
