"""Packing: nothing lost, nothing mixed, one shape."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manus_jax.learner.packing import (
    Layout,
    PackingError,
    Sample,
    fit,
    pack,
    with_loss_weights,
)


def sample(length, seed=0, turn_ends=()):
    rng = np.random.default_rng((seed, length))
    mask = rng.random(length) < 0.5
    mask[0] = False
    return Sample(
        rng.integers(1, 1000, length).astype(np.int32),
        mask,
        {"advantages": rng.normal(size=length).astype(np.float32)},
        turn_ends,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=20), st.integers(1, 4))
def test_every_sample_lies_whole_in_its_own_segment(lengths, rows):
    samples = [sample(n, i) for i, n in enumerate(lengths)]
    packed = pack(samples, Layout.for_batch(20, rows, 32))
    assert packed.arrays["input_ids"].shape == (-(-20 // rows), rows, 32)
    for name in ("input_ids", "loss_mask", "advantages"):
        for piece, s in zip(packed.unpack(packed.arrays[name]), samples, strict=True):
            expected = {"input_ids": s.input_ids, "loss_mask": s.loss_mask, **s.fields}[name]
            np.testing.assert_array_equal(piece, expected)
    for s, segment, position in zip(
        samples,
        packed.unpack(packed.arrays["segment_ids"]),
        packed.unpack(packed.arrays["positions"]),
        strict=True,
    ):
        assert len(set(segment)) == 1 and segment[0] > 0
        np.testing.assert_array_equal(position, np.arange(len(s)))
    # Padding is segment 0 and untrained, and no two samples share a segment.
    total = sum(lengths)
    assert int((packed.arrays["segment_ids"] > 0).sum()) == total
    assert not packed.arrays["loss_mask"][packed.arrays["segment_ids"] == 0].any()
    keys = {(m, r, int(packed.arrays["segment_ids"][m, r, s])) for m, r, s, _ in packed.places}
    assert len(keys) == len(samples)
    assert not (packed.arrays["segment_ids"][packed.used :] > 0).any()


def test_first_fit_decreasing_fills_the_rows_worked_out_by_hand():
    # Longest first: 7 opens row 0, 6 row 1, 5 row 2; 3 goes to row 0 (7+3=10), 3 to row 1 (9),
    # 2 to row 2 (7), 1 to row 1 (10).
    packed = pack([sample(n, i) for i, n in enumerate([3, 7, 1, 6, 3, 2, 5])], Layout(3, 1, 10))
    assert [m for m, *_ in packed.places] == [0, 0, 1, 1, 1, 2, 2]
    assert packed.used == 3
    assert packed.metrics()["packing/efficiency"] == pytest.approx(27 / 30)


def test_too_many_sequences_name_the_rows():
    with pytest.raises(PackingError, match=r"3 sequences need 3 rows .* 1 x 2 = 2"):
        pack([sample(9, i) for i in range(3)], Layout(1, 2, 10))


@pytest.mark.parametrize(
    ("policy", "lengths", "dropped", "cut"),
    [("drop", [5], 2.0, 0.0), ("cut", [5, 8], 1.0, 1.0)],
)
def test_overlong_sequences_follow_the_policy_and_are_counted(policy, lengths, dropped, cut):
    short, cuttable = sample(5), sample(20, 1, turn_ends=(4, 8, 15))
    hopeless = sample(20, 2, turn_ends=(15,))
    kept, counts = fit([short, cuttable, hopeless], 10, policy)
    assert [len(s) for s in kept] == lengths
    assert counts == {"packing/overlong_dropped": dropped, "packing/overlong_cut": cut}
    if policy == "cut":
        np.testing.assert_array_equal(kept[1].input_ids, cuttable.input_ids[:8])
        assert kept[1].turn_ends == (4, 8)


def test_overlong_is_an_error_when_so_chosen():
    with pytest.raises(PackingError, match="sequence 1 has 20 tokens and a row holds 10"):
        fit([sample(5), sample(20)], 10, "error")


def test_loss_weights_are_those_of_the_whole_batch():
    mask = [np.array([0, 1, 1, 0], bool), np.array([0, 1], bool)]
    samples = [Sample(np.ones(len(m), np.int32), m) for m in mask]
    weights = {
        mode: [s.fields["loss_weights"] for s in with_loss_weights(samples, mode)]
        for mode in ("token-mean", "seq-mean-token-mean")
    }
    np.testing.assert_allclose(weights["token-mean"][0], [0, 1 / 3, 1 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(weights["seq-mean-token-mean"][0], [0, 0.25, 0.25, 0], rtol=1e-6)
    np.testing.assert_allclose(weights["seq-mean-token-mean"][1], [0, 0.5], rtol=1e-6)


def test_a_trained_first_token_and_unequal_fields_are_refused():
    ids = np.ones(3, np.int32)
    with pytest.raises(PackingError, match="first token"):
        Sample(ids, np.ones(3, bool))
    with pytest.raises(PackingError, match=r"'advantages' has shape \(2,\)"):
        Sample(ids, np.zeros(3, bool), {"advantages": np.zeros(2, np.float32)})
