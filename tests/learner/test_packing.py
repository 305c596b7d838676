"""Packing keeps every token, separates segments and has a fixed shape."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import batch_of

from manus_jax.learner.packing import PackedRows, PackingError, RowShape, add_packing


def sequence(length, seed=0):
    rng = np.random.default_rng((seed, length))
    mask = rng.random(length) < 0.5
    mask[0] = False
    return {
        "input_ids": rng.integers(1, 1000, length).astype(np.int32),
        "loss_mask": mask,
        "advantages": rng.normal(size=length).astype(np.float32),
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=20), st.integers(1, 4))
def test_every_segment_lies_whole_in_its_own_place(lengths, rows):
    batch = add_packing(batch_of([sequence(n, i) for i, n in enumerate(lengths)]), 32)
    packed = PackedRows(batch, RowShape(rows, 32), capacity=-(-20 // rows))
    arrays = packed.arrays(["advantages"])
    assert arrays["input_ids"].shape == (-(-20 // rows), rows, 32)
    for name in ("input_ids", "loss_mask", "advantages"):
        np.testing.assert_array_equal(packed.unpack(arrays[name]), batch.batch[name])
    segments, positions = packed.unpack(arrays["segment_ids"]), packed.unpack(arrays["positions"])
    for segment, position, length in zip(segments, positions, lengths, strict=True):
        assert len(set(segment[:length])) == 1 and segment[0] > 0
        np.testing.assert_array_equal(position[:length], np.arange(length))
    # Padding is segment 0 and untrained, and no two sequences share a segment of a row.
    assert int((arrays["segment_ids"] > 0).sum()) == sum(lengths)
    assert not arrays["loss_mask"][arrays["segment_ids"] == 0].any()
    places = zip(batch.batch["packed_row"], batch.batch["packed_segment"], strict=True)
    assert len(set(places)) == len(lengths)
    assert not (arrays["segment_ids"][packed.used :] > 0).any()


def test_first_fit_decreasing_fills_the_rows_worked_out_by_hand():
    # Longest first: 7 opens row 0, 6 row 1, 5 row 2; 3 goes to row 0 (7+3=10), 3 to row 1 (9),
    # 2 to row 2 (7), 1 to row 1 (10).
    lengths = [3, 7, 1, 6, 3, 2, 5]
    batch = add_packing(batch_of([sequence(n, i) for i, n in enumerate(lengths)]), 10)
    assert batch.batch["packed_row"].tolist() == [0, 0, 1, 1, 1, 2, 2]
    packed = PackedRows(batch, RowShape(1, 10), 3)
    assert packed.used == 3
    assert packed.metrics()["packing/efficiency"] == pytest.approx(27 / 30)


def test_segments_of_different_groups_never_share_a_row():
    groups = ["a", "b", "a", "b", "c"]
    batch = batch_of([sequence(3, i) for i in range(5)], group_id=groups)
    together = add_packing(batch, 16)
    assert len(set(together.batch["packed_row"].tolist())) == 1
    apart = add_packing(batch, 16, by="group_id")
    assert apart.batch["packed_row"].tolist() == [0, 1, 0, 1, 2]


def test_a_mini_batch_takes_the_rows_of_its_groups_from_the_packing_of_the_step():
    batch = batch_of([sequence(5, i) for i in range(6)], group_id=list("aabbcc"))
    batch = add_packing(batch, 10, by="group_id")
    for mini in batch.make_iterator(1, by="group_id", seed=(3,)):
        packed = PackedRows(mini, RowShape(1, 10), 1)
        arrays = packed.arrays(["advantages"])
        assert packed.used == 1 and arrays["input_ids"].shape == (1, 1, 10)
        np.testing.assert_array_equal(packed.unpack(arrays["advantages"]), mini.batch["advantages"])


@pytest.mark.bug("B15")
def test_a_sequence_longer_than_a_row_is_an_error():
    with pytest.raises(PackingError, match="a sequence of 20 tokens does not fit into rows of 10"):
        add_packing(batch_of([sequence(5), sequence(20)]), 10)


def test_a_trained_first_token_is_an_error():
    ids = np.ones(3, np.int32)
    with pytest.raises(PackingError, match="first token"):
        add_packing(batch_of([{"input_ids": ids, "loss_mask": np.ones(3, bool)}]), 10)
