"""DataProto as an algebra: rows and keys."""

import jax.numpy as jnp
import numpy as np
import pytest
from data_protos import assert_same, make, quick
from hypothesis import given
from hypothesis import strategies as st

from manus_jax.data_proto import DataProto

# construction


def test_an_empty_proto_has_no_rows_and_unites_with_any():
    empty = DataProto.empty({"step": 1})
    assert len(empty) == 0
    united = empty.union(make(3))
    assert len(united) == 3
    assert united.meta_info == {"step": 1, "temperature": 0.7}


def test_per_row_values_alone_give_the_length():
    assert len(DataProto.from_dict(non_tensors={"a": [1, 2, 3]})) == 3


def test_unequal_lengths_name_keys_and_sizes():
    with pytest.raises(ValueError, match=r"'a' has 2, 'b' has 3"):
        DataProto.from_dict({"a": np.zeros(2)}, {"b": [1, 2, 3]})


@pytest.mark.parametrize("bad", [[1, 2], np.array(["x"]), np.array([None]), 3.0])
def test_batch_refuses_values_that_are_not_numeric_arrays(bad):
    with pytest.raises(ValueError, match=r"batch\['a'\] must be a NumPy or JAX array"):
        DataProto.from_dict({"a": bad})


def test_scalars_are_refused_in_batch():
    with pytest.raises(ValueError, match=r"batch\['a'\] is a scalar"):
        DataProto.from_dict({"a": np.zeros((), np.float32)})


@pytest.mark.parametrize("bad", ["text", {"a": 1}, 7])
def test_non_tensors_refuse_values_without_rows(bad):
    with pytest.raises(ValueError, match=r"non_tensor_batch\['a'\] must be a list"):
        DataProto.from_dict(non_tensors={"a": bad})


def test_one_name_cannot_be_in_both_parts():
    with pytest.raises(ValueError, match=r"\['a'\] are in both"):
        DataProto.from_dict({"a": np.zeros(1)}, {"a": [1]})


# rows


def test_an_integer_gives_a_row_without_leading_dimension():
    item = make(4)[-1]
    assert item.batch["ids"].tolist() == [9, 10, 11]
    assert item.non_tensor_batch == {"uid": "row 3", "turns": ["a", "a", "a"]}
    assert item.meta_info == {"temperature": 0.7}
    assert [row.non_tensor_batch["uid"] for row in make(2)] == ["row 0", "row 1"]


@quick
@given(rows=st.integers(0, 12), data=st.data())
def test_indexing_matches_python_lists(rows, data):
    proto, uids = make(rows), [f"row {i}" for i in range(rows)]
    bounds = st.none() | st.integers(-14, 14)
    cut = slice(data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 1, 2, -1])))
    index = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=20)) if rows else []
    mask = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    for got, want in [
        (proto[cut], uids[cut]),
        (proto[index], [uids[i] for i in index]),
        (proto[np.array(mask, bool)], [u for u, m in zip(uids, mask, strict=True) if m]),
    ]:
        assert got.non_tensor_batch["uid"].tolist() == want
        assert [f"row {i}" for i in (got.batch["ids"][:, 0] // 3).tolist()] == want


@pytest.mark.parametrize("jax_arrays", [False, True])
def test_indexes_out_of_range_raise_also_for_jax_arrays(jax_arrays):
    with pytest.raises(IndexError, match=r"index 5 is out of bounds .* size 4"):
        make(4, jax_arrays)[[0, 5]]
    with pytest.raises(IndexError, match=r"index -5 is out of bounds .* size 4"):
        make(4, jax_arrays)[-5]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64])
def test_indexes_of_any_integer_type(dtype):
    picked = make(300)[np.array([100, 0], dtype)]
    assert picked.non_tensor_batch["uid"].tolist() == ["row 100", "row 0"]
    assert make(3)[jnp.array(2)].non_tensor_batch["uid"] == "row 2"


def test_bad_indexes_name_their_fault():
    with pytest.raises(IndexError, match=r"boolean .* 4 .* 3"):
        make(4)[np.array([True, False, True])]
    with pytest.raises(IndexError, match="integer"):
        make(4)[np.array([0.5])]
    with pytest.raises(ValueError, match="one-dimensional"):
        make(4)[np.zeros((2, 2), int)]


@pytest.mark.bug("B11")
@quick
@given(rows=st.sampled_from([1, 2, 7, 20]), data=st.data())  # JAX compiles for every size
def test_reorder_keeps_values_in_step_and_the_inverse_restores(rows, data):
    order = data.draw(st.permutations(range(rows)))
    proto = make(rows, jax_arrays=data.draw(st.booleans()))
    moved = proto.reorder(order)
    assert moved.non_tensor_batch["uid"].tolist() == [f"row {i}" for i in order]
    assert (moved.batch["ids"][:, 0] // 3).tolist() == list(order)
    assert [len(t) for t in moved.non_tensor_batch["turns"]] == list(order)
    assert_same(moved.reorder(np.argsort(order)), proto)


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3], [[0, 1, 2]]])
def test_reorder_refuses_indexes_that_are_not_a_permutation(order):
    with pytest.raises(ValueError, match="permutation of 3 rows"):
        make(3).reorder(order)


@quick
@given(chunks=st.sampled_from([1, 2, 5]), size=st.sampled_from([1, 3]), jax_arrays=st.booleans())
def test_concat_of_chunks_is_the_identity(chunks, size, jax_arrays):
    proto = make(chunks * size, jax_arrays)
    parts = proto.chunk(chunks)
    assert [len(part) for part in parts] == [size] * chunks
    assert_same(DataProto.concat(parts), proto)


def test_chunks_that_do_not_divide_show_the_arithmetic():
    with pytest.raises(ValueError, match=r"10 rows do not divide into 4 equal chunks \(10 % 4 = 2"):
        make(10).chunk(4)
    with pytest.raises(ValueError, match="0 equal chunks"):
        make(10).chunk(0)


def test_concat_refuses_other_keys_dtypes_shapes_and_metadata():
    a = DataProto.from_dict({"x": np.zeros((2, 3), np.float32)}, meta_info={"t": 1})
    with pytest.raises(ValueError, match=r"batch of item 1 has keys \['y'\].*item 0 has \['x'\]"):
        DataProto.concat([a, DataProto.from_dict({"y": a.batch["x"]})])
    with pytest.raises(ValueError, match=r"batch\['x'\] is not the same in all.*float32.*float64"):
        DataProto.concat([a, DataProto.from_dict({"x": np.zeros((2, 3))})])
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        DataProto.concat([a, DataProto.from_dict({"x": np.zeros((2, 4), np.float32)})])
    with pytest.raises(ValueError, match=r"meta_info\['t'\] differs between the two: 1 and 2"):
        DataProto.concat([a, DataProto.from_dict(a.batch, meta_info={"t": 2})])
    with pytest.raises(ValueError, match="at least one"):
        DataProto.concat([])


def test_repeat_interleaved_or_in_blocks():
    proto = make(2)
    assert proto.repeat(3).non_tensor_batch["uid"].tolist() == ["row 0"] * 3 + ["row 1"] * 3
    blocks = proto.repeat(2, interleave=False)
    assert blocks.non_tensor_batch["uid"].tolist() == ["row 0", "row 1"] * 2
    assert blocks.batch["ids"][:, 0].tolist() == [0, 3, 0, 3]


@quick
@given(batches=st.integers(1, 4), size=st.integers(1, 4), epochs=st.integers(1, 3))
def test_the_iterator_visits_each_row_once_an_epoch(batches, size, epochs):
    proto, rows = make(batches * size), batches * size
    seen = [
        [
            part.non_tensor_batch["uid"].tolist()
            for part in proto.make_iterator(size, epochs=epochs, seed=seed)
        ]
        for seed in ((5,), (5,), None)
    ]
    assert seen[0] == seen[1]
    flat = [uid for part in seen[0] for uid in part]
    for epoch in range(epochs):
        assert sorted(flat[epoch * rows : (epoch + 1) * rows]) == sorted(
            f"row {i}" for i in range(rows)
        )
    assert [u for part in seen[2] for u in part] == [f"row {i}" for i in range(rows)] * epochs


def test_the_iterator_shuffles_each_epoch_anew_and_by_seed():
    def order(seed):
        parts = make(32).make_iterator(32, epochs=2, seed=(seed,))
        return [part.non_tensor_batch["uid"].tolist() for part in parts]

    first, second = order(0)
    assert first != second
    assert first != order(1)[0]


def test_mini_batches_that_do_not_divide_raise_before_iteration():
    with pytest.raises(ValueError, match="7 rows do not divide into mini-batches of 2"):
        make(7).make_iterator(2)


def test_the_iterator_by_a_host_column_keeps_groups_whole_and_in_order():
    proto = DataProto.from_dict({"x": np.arange(7)}, {"group_id": list("abacbac")})
    parts = list(proto.make_iterator(2, by="group_id", epochs=2, seed=(0, 1)))
    groups = [part.non_tensor_batch["group_id"].tolist() for part in parts]
    assert [len(set(g)) for g in groups] == [2, 1, 2, 1]
    for first, second in (parts[:2], parts[2:]):
        assert sorted([*first.batch["x"], *second.batch["x"]]) == list(range(7))
    assert all(part.batch["x"].tolist() == sorted(part.batch["x"]) for part in parts)
    whole = list(proto.make_iterator(by="group_id"))
    assert len(whole) == 1 and whole[0].batch["x"].tolist() == list(range(7))
    with pytest.raises(KeyError, match="no key 'task' in non_tensor_batch"):
        proto.make_iterator(2, by="task")


# keys


def test_select_and_pop():
    proto = make(2)
    assert list(proto.select(["ids"], [], []).batch) == ["ids"]
    popped, rest = proto.pop(["ids"], ["uid"], ["temperature"])
    assert (list(popped.batch), list(popped.non_tensor_batch)) == (["ids"], ["uid"])
    assert (list(rest.batch), list(rest.non_tensor_batch)) == (["score"], ["turns"])
    assert (popped.meta_info, rest.meta_info) == ({"temperature": 0.7}, {})
    assert list(proto.batch) == ["ids", "score"], "the original is as it was"


def test_errors_for_unknown_keys_list_the_existing_ones():
    with pytest.raises(KeyError, match=r"no key 'logp' in batch; there are \['ids', 'score'\]"):
        make(2).select(["logp"])
    with pytest.raises(KeyError, match="no key 'x' in non_tensor_batch"):
        make(2).pop(non_tensor_batch_keys=["x"])
    with pytest.raises(ValueError, match="got the string 'ids'"):
        make(2).select("ids")


@quick
@given(rows=st.integers(1, 6))
def test_union_with_its_own_parts_is_the_identity(rows):
    proto = make(rows)
    popped, rest = proto.pop(["score"], ["uid"])
    united = rest.union(popped)
    assert_same(united.select(["ids", "score"], ["uid", "turns"]), proto.select())
    assert_same(proto.union(proto), proto)


def test_union_accepts_equal_nan_and_refuses_conflicts_by_name():
    nan = DataProto.from_dict({"x": np.array([np.nan, 1.0])}, {"v": [float("nan"), [1]]})
    again = DataProto.from_dict({"x": np.array([np.nan, 1.0])}, {"v": [float("nan"), [1]]})
    assert len(nan.union(again)) == 2
    with pytest.raises(ValueError, match=r"batch\['x'\] differs .* float64\[2\] and float32\[2\]"):
        nan.union(DataProto.from_dict({"x": np.array([np.nan, 1.0], np.float32)}))
    with pytest.raises(ValueError, match=r"non_tensor_batch\['v'\] differs"):
        nan.union(DataProto.from_dict(non_tensors={"v": [float("nan"), [True]]}))
    with pytest.raises(ValueError, match=r"meta_info\['t'\] differs between the two: 1 and 1.0"):
        DataProto.empty({"t": 1}).union(DataProto.empty({"t": 1.0}))
    with pytest.raises(ValueError, match=r"'ids'\] differs .* int32\[2, 3\] and int32\[3, 3\]"):
        make(2).union(make(3))
    with pytest.raises(ValueError, match=r"'ids' has 2, .*'x' has 3"):
        make(2).union(DataProto.from_dict({"x": np.zeros(3)}))


def test_arrays_are_shared_where_nothing_changed():
    proto = make(4)
    assert proto.select(["ids"]).batch["ids"] is proto.batch["ids"]
    assert np.shares_memory(proto[1:3].batch["ids"], proto.batch["ids"])
