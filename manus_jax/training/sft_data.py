"""Batches of conversations for supervised fine-tuning."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from manus_jax.config.settings import DataSettings, LossOn
from manus_jax.data.chat import ChatStream, ConversationError, EncodedConversation
from manus_jax.data.mixture import Sources, file_sources
from manus_jax.data.tasks import DatasetError, Task, read_tasks
from manus_jax.data_proto import DataProto
from manus_jax.learner.packing import PackingError, add_packing
from manus_jax.rollout.batch import padded


class Encoder:
    """Tokenizes the conversations of tasks, each of them once.

    The loss is on the assistant's turns, or with `loss_on` "all" on every token. If the template
    forks a conversation, only its first sequence has loss on every token, so that no prompt is
    trained twice.
    """

    def __init__(self, stream: ChatStream, loss_on: LossOn = "turns"):
        self._stream = stream
        self._loss_on = loss_on
        self._cache: dict[int, list[EncodedConversation]] = {}

    def __call__(self, tasks: Iterable[Task]) -> list[EncodedConversation]:
        """The sequences of all tasks, in order; several per task if the template forks it."""
        return [sequence for task in tasks for sequence in self._encoded(task)]

    def _encoded(self, task: Task) -> list[EncodedConversation]:
        key = id(task)
        if key not in self._cache:
            encoded = self._stream.encode(task.messages, task.item_id, task.tools)
            if self._loss_on == "all":
                everything = np.ones_like(encoded[0].loss_mask)
                everything[0] = False  # nothing precedes it
                encoded[0] = dataclasses.replace(encoded[0], loss_mask=everything)
            self._cache[key] = encoded
        return self._cache[key]


def read_conversations(data: DataSettings) -> tuple[Sources, list[Task]]:
    """The weighted training sources, and the held-out conversations, which they exclude."""
    if not data.train_files:
        raise DatasetError("data.train_files is empty: name a file of conversations to learn from")
    held_out = read_tasks(data.val_files, needs="conversation") if data.val_files else []
    listed = (read_tasks(path, needs="conversation") for path in data.train_files)
    sources = file_sources(data, listed, held_out)
    for task in (t for tasks in (*(s[1] for s in sources), held_out) for t in tasks):
        if not any(m.train for m in task.messages):
            raise ConversationError(f"{task.item_id} has no assistant turn to train on")
    return sources, held_out


def fit(
    conversations: Sequence[EncodedConversation], length: int, overlong: str
) -> tuple[list[EncodedConversation], dict[str, float]]:
    """The conversations that fit into a row of `length` tokens, and how many were changed.

    A conversation that is too long raises ("error"), is dropped ("drop"), or is cut after the last
    turn that fits ("cut"; it is dropped if the first assistant turn does not fit).
    """
    kept, dropped, cut = [], 0, 0
    for index, conversation in enumerate(conversations):
        tokens = len(conversation.input_ids)
        if tokens <= length:
            kept.append(conversation)
            continue
        if overlong == "error":
            raise PackingError(
                f"sequence {index} has {tokens} tokens, but a row holds {length}; raise "
                "data.max_length, or choose data.overlong = 'drop' or 'cut'"
            )
        end = max((e + 1 for e in conversation.turn_ends if e < length), default=0)
        if overlong == "cut" and end and conversation.loss_mask[:end].any():
            ends = tuple(e for e in conversation.turn_ends if e < end)
            ids, mask = conversation.input_ids[:end], conversation.loss_mask[:end]
            kept.append(EncodedConversation(ids, mask, ends))
            cut += 1
        else:
            dropped += 1
    return kept, {"packing/overlong_dropped": float(dropped), "packing/overlong_cut": float(cut)}


def conversation_batch(conversations: Sequence[EncodedConversation], length: int) -> DataProto:
    """One row per conversation, packed into rows of `length` tokens."""
    pad = functools.partial(padded, width=max(len(c.input_ids) for c in conversations))
    batch = DataProto.from_dict(
        {
            "input_ids": pad([c.input_ids for c in conversations], np.int32),
            "attention_mask": pad([np.ones(len(c.input_ids), bool) for c in conversations], bool),
            "loss_mask": pad([c.loss_mask for c in conversations], bool),
        }
    )
    return add_packing(batch, length)


def unigram_entropy(conversations: Sequence[EncodedConversation]) -> float:
    """Entropy in nats of the trained tokens' frequencies: the best loss without any context."""
    tokens = np.concatenate([c.input_ids[c.loss_mask] for c in conversations])
    p = np.bincount(tokens) / len(tokens)
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())
