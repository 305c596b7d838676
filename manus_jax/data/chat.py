"""Conversations as exact tokens, through the model's own chat template.

The idea: tokens only ever grow. A prompt is what the template adds as text since the last turn
ended, tokenized on its own and appended; a turn of the assistant is what the model would sample, up
to and including its end-of-turn token. So the ids trained on are the ids a sampler sees and
produces, turn by turn, and nothing is decoded and tokenized again. `ChatStream` gives the pieces to
a rollout; `ChatStream.encode` strings them together for supervised training.

Left out: tools in the template, images, and control tokens spelled out inside a message's text,
which the tokenizer reads as control tokens, as it does everywhere else.
"""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from manus_jax.errors import UserError

if TYPE_CHECKING:  # Message is for readers of data too, who need not pay for this import
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

ROLES = {"human": "user", "env": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}
"""Names of roles in data → names of roles in chat templates."""

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Stand-ins for the turn a model will sample; its text must survive trimming and occur nowhere else.
_SAMPLED = "sampled9f3b7c"
_STAND_IN = [{"role": "user", "content": "user"}, {"role": "assistant", "content": _SAMPLED}]


class ChatTemplateError(UserError, ValueError):
    """A tokenizer has no chat template, or one whose turns cannot be told apart."""


class ConversationError(UserError, ValueError):
    """A conversation that cannot be read, or holds nothing to train on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn; `train` says whether its tokens are the model's own, to be learned."""

    role: str
    content: str
    train: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedConversation:
    """`turn_ends`: index of the last token of each assistant turn, from the first trained on."""

    input_ids: np.ndarray  # int32 [length]
    loss_mask: np.ndarray  # bool [length]: True on the tokens to be learned
    turn_ends: tuple[int, ...]


def message_from_record(record: dict[str, Any]) -> Message:
    """Reads `{"from", "value", "loss"}` (AgentGym, OpenManus) or `{"role", "content"}`.

    An assistant's turn is trained unless its `loss` is false; no other turn ever is.
    """
    if not isinstance(record, dict):
        raise ConversationError(f"a message must be an object, got {type(record).__name__}")
    who, what = ("from", "value") if "from" in record else ("role", "content")
    name, content = record.get(who), record.get(what)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ConversationError(
            f"unknown role {name!r} under {who!r}; there are {', '.join(ROLES)}"
            if name is not None
            else f"a message needs a role under 'role' or 'from'; its keys are {list(record)}"
        )
    if not isinstance(content, str):
        raise ConversationError(f"a message needs text under {what!r}, got {content!r}")
    loss = record.get("loss")
    return Message(role, content, role == "assistant" and (loss is None or bool(loss)))


class ChatStream:
    """The tokens of a conversation that grows turn by turn, for one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        if not getattr(tokenizer, "chat_template", None):
            raise ChatTemplateError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template: "
                "use that of an instruction-tuned model, or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        tail = self._after_sampled([], add_generation_prompt=False)
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        found = [(tail.index(token), -len(token), token) for token in special if token in tail]
        if not found:
            raise ChatTemplateError(
                f"the chat template ends an assistant's turn with {tail!r}, which holds no special "
                "token that the model could sample to end its turn"
            )
        start, _, token = min(found)
        self._stop_text, self._after_stop = tail[: start + len(token)], tail[start + len(token) :]
        self.stop_id: int = tokenizer.convert_tokens_to_ids(token)
        """The token with which the model ends its turn: a sampler must stop on it."""

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the opening prompt, up to where the assistant begins to speak."""
        return self._tokenize([self._render([_as_dicts(messages)], True)[0]])[0]

    def extend(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids that follow the turn `sampled` when `messages` answer it, up to the next turn.

        Where the sampled turn was cut before its end-of-turn token, that token comes first here;
        the model did not sample it, and it must not be trained on.
        """
        if not messages:
            raise ConversationError("extend needs the messages that follow the sampled turn")
        rest = self._after_sampled(_as_dicts(messages), add_generation_prompt=True)
        if not rest.startswith(self._stop_text):
            raise ChatTemplateError(
                f"the chat template ends an assistant's turn with {self._stop_text!r} when it is "
                f"the last, but continues {rest[:40]!r} when a {messages[0].role} answers"
            )
        ended = len(sampled) > 0 and sampled[-1] == self.stop_id
        return self._tokenize([rest[len(self._stop_text) :] if ended else rest])[0]

    def encode(
        self, messages: Sequence[Message], name: str = "conversation"
    ) -> EncodedConversation:
        """Tokens and loss mask of a whole conversation, as its turns would have been sampled.

        All before the first trained turn is one opening prompt, as `start` gives it. The mask
        covers what the model must sample: a trained turn's text and its end-of-turn token, not
        what the template writes after that. `name` is how errors call this conversation.
        """
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        trained = [i for i in turns if messages[i].train]
        if not trained:
            what = "to train on (all have loss false)" if turns else f"in {len(messages)} messages"
            raise ConversationError(f"{name} has no assistant turn {what}")
        if trained[0] == 0:
            raise ConversationError(
                f"{name} opens with an assistant turn; a prompt must precede it"
            )
        turns = turns[turns.index(trained[0]) :]
        chat = _as_dicts(messages)
        prompts = self._render([chat[:i] for i in turns], True)
        wholes = self._render([chat[: i + 1] for i in turns], False)

        done = ""  # the text whose tokens are in `segments`: it ends with an end-of-turn token
        segments: list[tuple[str, bool]] = []
        for number, (i, prompt, whole) in enumerate(zip(turns, prompts, wholes, strict=True)):
            if not prompt.startswith(done):
                raise ChatTemplateError(
                    f"{name}: the chat template rewrites history: message {turns[number - 1]} "
                    f"(assistant) reads differently once message {i} is to follow; set a "
                    "tokenizer.chat_template that leaves earlier turns as they were"
                )
            if not whole.startswith(prompt) or not whole.endswith(
                self._stop_text + self._after_stop
            ):
                raise ChatTemplateError(
                    f"{name}: the chat template renders message {i} (assistant) as something other "
                    f"than its prompt, its text and {self._stop_text!r}: {whole[-60:]!r}"
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
                    f"reads differently once message {len(messages) - 1} follows"
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
        # Rendered after a stand-in: a rollout keeps what it sampled, whatever a template would make
        # of it in retrospect, and the cost does not grow with the length of the episode.
        text = self._render([_STAND_IN + messages], add_generation_prompt)[0]
        _, found, rest = text.partition(_SAMPLED)
        if not found:
            raise ChatTemplateError(f"the chat template leaves out the assistant's turn: {text!r}")
        return rest

    def _render(self, chats: list[list[dict[str, str]]], add_generation_prompt: bool) -> list[str]:
        try:
            return self._tokenizer.apply_chat_template(
                chats, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            roles = [message["role"] for message in chats[-1]]
            raise ChatTemplateError(f"the chat template refuses roles {roles}: {error}") from error

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"]


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, out_dir: str | os.PathLike[str] | None = None
) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer with a ChatML template, trained on `texts`: no download.

    The same texts give the same tokenizer. The vocabulary is smaller than `vocab_size` where the
    texts have no more pairs to merge. Saved to `out_dir`, it loads with AutoTokenizer and vLLM.
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
