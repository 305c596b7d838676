"""Deltas: what is encoded comes back to the bit, and a small change is small."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from manus_jax.weights import delta
from manus_jax.weights.manifest import TensorSpec, WeightsError


def applied(old, sparse):
    new = old.copy()
    spec = TensorSpec({2: "BF16", 4: "F32"}[old.dtype.itemsize], old.shape)
    new[delta.positions_of(sparse, spec, "w")] = sparse.values
    return new


@given(
    st.sampled_from([np.uint16, np.uint32]).flatmap(
        lambda kind: st.integers(0, 700).flatmap(
            lambda n: st.tuples(
                arrays.arrays(kind, n, elements=st.integers(0, 3)),
                arrays.arrays(kind, n, elements=st.integers(0, 3), fill=st.just(0)),
            )
        )
    )
)
def test_a_difference_turns_the_old_into_the_new(pair):
    old, new = pair
    sparse = delta.difference(old, new)
    assert len(sparse.values) == np.count_nonzero(old != new)
    np.testing.assert_array_equal(applied(old, sparse), new)


@given(st.lists(st.integers(0, 300_000), unique=True, max_size=8))
def test_gaps_of_any_width(positions):
    old = np.zeros(300_001, np.uint16)
    new = old.copy()
    new[positions] = 7
    np.testing.assert_array_equal(applied(old, delta.difference(old, new)), new)


def test_one_per_cent_of_bfloat16_takes_less_than_three():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 1_000_000, dtype=np.uint16)
    new = np.where(rng.random(old.shape) < 0.01, old + np.uint16(1), old)
    assert delta.difference(old, new).nbytes <= 0.03 * old.nbytes


@pytest.mark.parametrize("share, kind", [(1.0, np.uint16), (0.5, np.uint16), (0.5, np.uint32)])
def test_a_difference_is_never_smaller_than_predicted(share, kind):
    rng = np.random.default_rng(1)
    old = np.zeros(10_000, kind)
    new = (rng.random(old.shape) < share).astype(kind)
    told = delta.least_bytes(np.count_nonzero(new), new)
    assert delta.difference(old, new).nbytes == told  # no gap is wider than a byte


def test_a_single_change_in_a_large_tensor_is_encoded_with_wide_gaps():
    old = np.zeros(10_000_000, np.uint16)
    new = old.copy()
    new[-1] = 1
    assert delta.difference(old, new).nbytes < 400  # 9,999,999 / 65,535 skips of two bytes


def test_places_beyond_the_tensor_and_values_without_a_place_are_refused():
    spec = TensorSpec("BF16", (10,))
    beyond = delta.Sparse(np.array([10], np.uint8), np.array([1], np.uint16))
    with pytest.raises(WeightsError, match="position 10, but only 10 elements"):
        delta.positions_of(beyond, spec, "w")
    unplaced = delta.Sparse(np.array([1], np.uint8), np.array([1, 2], np.uint16))
    with pytest.raises(WeightsError, match="1 positions but 2 values"):
        delta.positions_of(unplaced, spec, "w")
