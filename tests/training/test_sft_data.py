"""Conversations that are too long for a row, and what a model without context would pay."""

import numpy as np
import pytest

from manus_jax.data.chat import EncodedConversation
from manus_jax.learner.packing import PackingError
from manus_jax.training.sft_data import conversation_batch, fit, unigram_entropy


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
