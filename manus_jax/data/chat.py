"""Conversations as exact token ids, rendered with the model's own chat template.

The ids are append-only. A prompt is the text that the template adds after the previous turn,
tokenized separately and appended; an assistant turn is what the model samples, up to and including
its end-of-turn token. The ids used for training are therefore the ids that the sampler consumes and
produces, and nothing is decoded and re-encoded. A rollout uses `ChatStream.start` and `extend`;
supervised training uses `ChatStream.encode`, which concatenates the same pieces. Not supported:
tools in the template, images, and escaping of control tokens in message text, which the tokenizer
reads as control tokens.
"""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

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


class ChatTemplateError(UserError, ValueError):
    """The tokenizer has no chat template, or one whose turns cannot be separated."""


class ConversationError(UserError, ValueError):
    """A conversation is malformed or has no turn to train on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message; `train` marks assistant messages whose tokens are trained on."""

    role: str
    content: str
    train: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedConversation:
    """`turn_ends`: last token index of each assistant turn, starting at the first trained turn."""

    input_ids: np.ndarray  # int32 [length]
    loss_mask: np.ndarray  # bool [length]: True on trained tokens
    turn_ends: tuple[int, ...]


def message_from_record(record: dict[str, Any]) -> Message:
    """Reads `{"from", "value", "loss"}` (AgentGym, OpenManus) or `{"role", "content"}`.

    Assistant messages are trained on unless `loss` is false; other messages never are.
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
    if not isinstance(content, str):
        raise ConversationError(f"a message needs text under {what!r}, got {content!r}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ConversationError(f"the text under {what!r} is not valid Unicode: {error}") from None
    loss = record.get("loss")
    if loss not in (None, False, True):  # 0 and 1 are equal to them
        raise ConversationError(f"'loss' must be true, false or null, got {loss!r}")
    return Message(role, content, role == "assistant" and loss in (None, True))


class ChatStream:
    """Encodes conversations turn by turn with one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        if not getattr(tokenizer, "chat_template", None):
            raise ChatTemplateError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; "
                "use an instruction-tuned model's tokenizer, or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
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

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the first prompt, including the header of the assistant turn."""
        return self._tokenize([self._render([_as_dicts(messages)], True)[0]])[0]

    def extend(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids to append after the turn `sampled` and `messages`, up to the next assistant turn.

        If the sampled turn was truncated before its end-of-turn token, the result starts with that
        token. The model did not sample it, so it must not be trained on.
        """
        if not messages:
            raise ConversationError("extend needs the messages that follow the sampled turn")
        rest = self._after_sampled(_as_dicts(messages), add_generation_prompt=True)
        if not rest.startswith(self._stop_text):
            raise ChatTemplateError(
                f"the chat template ends the last assistant turn with {self._stop_text!r}, but "
                f"continues with {rest[:40]!r} when a {messages[0].role} message follows"
            )
        ended = len(sampled) > 0 and sampled[-1] == self.stop_id
        return self._tokenize([rest[len(self._stop_text) :] if ended else rest])[0]

    def encode(
        self, messages: Sequence[Message], name: str = "conversation"
    ) -> EncodedConversation:
        """Tokens and loss mask of a whole conversation, split into turns as in a rollout.

        Everything before the first trained turn is one prompt, as from `start`. The mask covers
        what the model samples: the text of a trained turn and its end-of-turn token, but not what
        the template writes after it. `name` identifies the conversation in errors.
        """
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
        prompts = self._render([chat[:i] for i in turns], True)
        wholes = self._render([chat[: i + 1] for i in turns], False)

        done = ""  # the text covered by `segments`; it ends with an end-of-turn token
        segments: list[tuple[str, bool]] = []
        for number, (i, prompt, whole) in enumerate(zip(turns, prompts, wholes, strict=True)):
            if not prompt.startswith(done):
                raise ChatTemplateError(
                    f"{name}: the chat template rewrites history: message {turns[number - 1]} "
                    f"(assistant) is rendered differently when message {i} follows; set a "
                    "tokenizer.chat_template that keeps earlier turns unchanged"
                )
            if not whole.startswith(prompt) or not whole.endswith(
                self._stop_text + self._after_stop
            ):
                raise ChatTemplateError(
                    f"{name}: the chat template does not render message {i} (assistant) as its "
                    f"prompt, its text and {self._stop_text!r}: {whole[-60:]!r}"
                )
            end = len(whole) - len(self._after_stop)
            segments += [
                (prompt[len(done) :], False),
                (whole[len(prompt) : end], messages[i].train),
            ]
            done = whole[:end]
        if turns[-1] != len(messages) - 1:
            whole = self._render([chat], False)[0]
            if not whole.startswith(done):
                raise ChatTemplateError(
                    f"{name}: the chat template rewrites history: message {turns[-1]} (assistant) "
                    f"is rendered differently when message {len(messages) - 1} follows"
                )
            segments.append((whole[len(done) :], False))

        pieces = self._tokenize([text for text, _ in segments])
        ends = np.cumsum([len(piece) for piece in pieces])
        return EncodedConversation(
            input_ids=np.array([i for piece in pieces for i in piece], np.int32),
            loss_mask=np.repeat([train for _, train in segments], [len(p) for p in pieces]),
            turn_ends=tuple(int(end) - 1 for end in ends[1 : 2 * len(turns) : 2]),
        )

    def _after_sampled(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        # Rendered after a placeholder: a rollout keeps what it sampled even if the template would
        # rewrite it later, and the cost does not grow with the length of the episode.
        text = self._render([_PLACEHOLDER + messages], add_generation_prompt)[0]
        _, found, rest = text.partition(_SAMPLED)
        if not found:
            raise ChatTemplateError(f"the chat template omits the assistant turn: {text!r}")
        return rest

    def _render(self, chats: list[list[dict[str, str]]], add_generation_prompt: bool) -> list[str]:
        try:
            return self._tokenizer.apply_chat_template(
                chats, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            roles = [message["role"] for message in chats[-1]]
            raise ChatTemplateError(f"the chat template rejects roles {roles}: {error}") from error

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"]


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, out_dir: str | os.PathLike[str] | None = None
) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE tokenizer with a ChatML template on `texts`, without downloads.

    The result is deterministic. The vocabulary is smaller than `vocab_size` if the texts have no
    more pairs to merge. A tokenizer saved to `out_dir` loads with AutoTokenizer and vLLM.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END_OF_TEXT, START_OF_TURN, END_OF_TURN]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + len(special):
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {len(alphabet)} bytes and {len(special)} "
            f"special tokens need {len(alphabet) + len(special)}"
        )
    tokenizer = Tokenizer(models.BPE())
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


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]
