"""Conversations that are too long for a row, and the loss without any context."""

import itertools

import numpy as np
import pytest
from chat_templates import QWEN3, QWEN25, tokenizer_with

from manus_jax.config.settings import ChatSettings
from manus_jax.data.chat import ChatStream, EncodedConversation, Message
from manus_jax.data.tasks import Task
from manus_jax.learner.packing import PackingError
from manus_jax.training.sft_data import Encoder, conversation_batch, fit, unigram_entropy


def conversation(length, seed=0, turn_ends=()):
    rng = np.random.default_rng((seed, length))
    mask = rng.random(length) < 0.5
    mask[0] = False
    return EncodedConversation(rng.integers(1, 1000, length).astype(np.int32), mask, turn_ends)


@pytest.mark.parametrize(
    ("policy", "lengths", "dropped", "cut"),
    [("drop", [5], 2.0, 0.0), ("cut", [5, 8], 1.0, 1.0)],
)
def test_overlong_sequences_follow_the_policy_and_are_counted(policy, lengths, dropped, cut):
    short, cuttable = conversation(5), conversation(20, 1, turn_ends=(3, 7, 14))
    hopeless = conversation(20, 2, turn_ends=(14,))
    kept, counts = fit([short, cuttable, hopeless], 10, policy)
    assert [len(c.input_ids) for c in kept] == lengths
    assert counts == {"packing/overlong_dropped": dropped, "packing/overlong_cut": cut}
    if policy == "cut":
        np.testing.assert_array_equal(kept[1].input_ids, cuttable.input_ids[:8])
        assert kept[1].turn_ends == (3, 7)


def test_overlong_is_an_error_when_so_chosen():
    with pytest.raises(PackingError, match="sequence 1 has 20 tokens, but a row holds 10"):
        fit([conversation(5), conversation(20)], 10, "error")


def test_a_batch_has_a_row_per_conversation_and_knows_its_packing():
    batch = conversation_batch([conversation(5), conversation(4), conversation(9)], 10)
    assert batch.batch["attention_mask"].sum(1).tolist() == [5, 4, 9]
    assert batch.batch["packed_row"].tolist() == [1, 1, 0]


def test_unigram_entropy_by_hand():
    mask = np.array([False, True, True, True, True])
    ids = np.array([9, 1, 1, 2, 2], np.int32)
    assert unigram_entropy([EncodedConversation(ids, mask, (4,))]) == pytest.approx(np.log(2))


def task(*said):
    roles = itertools.cycle(("user", "assistant"))
    messages = [
        Message(role, text, role == "assistant") for text, role in zip(said, roles, strict=False)
    ]
    return Task(env=None, item=None, item_id="x", messages=tuple(messages))


def test_the_loss_may_be_on_every_token_but_the_first():
    stream = ChatStream(tokenizer_with(QWEN25))
    tasks = [task("Where?", "left"), task("And now?", "up", "A wall.", "down")]
    for turns, every in zip(Encoder(stream)(tasks), Encoder(stream, "all")(tasks), strict=True):
        np.testing.assert_array_equal(every.input_ids, turns.input_ids)
        assert every.loss_mask.tolist() == [False] + [True] * (len(every.input_ids) - 1)
        assert 0 < turns.loss_mask.sum() < len(turns.input_ids) / 2


def test_a_forked_prompt_is_trained_once():
    stream = ChatStream(tokenizer_with(QWEN3), ChatSettings(thinking="strip"))
    thoughts = task(
        "Where?", "<think>\nhm\n</think>\n\nleft", "And?", "<think>\nso\n</think>\n\nup"
    )
    turns, every = Encoder(stream)([thoughts]), Encoder(stream, "all")([thoughts])
    assert len(every) == len(turns) == 2
    assert every[0].loss_mask[1:].all()
    np.testing.assert_array_equal(every[1].loss_mask, turns[1].loss_mask)
