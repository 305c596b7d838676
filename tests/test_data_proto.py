import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manus_jax.data_proto import ROW_WEIGHT, DataProto

quick = settings(deadline=None, max_examples=40)


def make(rows, jax_arrays=False):
    ids = np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)
    score = np.arange(rows, dtype=np.float32) / 7
    return DataProto.from_dict(
        {"ids": jnp.asarray(ids) if jax_arrays else ids, "score": score},
        {"uid": [f"row {i}" for i in range(rows)], "turns": [["a"] * i for i in range(rows)]},
        {"temperature": 0.7},
    )


def contents(proto):
    """Everything in a DataProto as plain Python, to compare without the code under test."""
    arrays = {k: (str(v.dtype), v.shape, np.asarray(v).tobytes()) for k, v in proto.batch.items()}
    return arrays, {k: v.tolist() for k, v in proto.non_tensor_batch.items()}, proto.meta_info


def assert_same(a, b):
    assert contents(a) == contents(b)


def mesh_of(**axes):
    size = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[:size],
    )


# construction


def test_from_single_dict_sorts_columns_by_type():
    proto = DataProto.from_single_dict(
        {
            "ids": np.zeros((2, 4), np.int32),
            "mask": jnp.ones((2, 4), bool),
            "name": np.array(["a", "b"]),
            "info": [{"k": 1}, None],
        },
        meta_info={"step": 3},
    )
    assert set(proto.batch) == {"ids", "mask"}
    assert proto.non_tensor_batch["name"].tolist() == ["a", "b"]
    assert proto.non_tensor_batch["info"].tolist() == [{"k": 1}, None]
    assert proto.meta_info == {"step": 3}
    assert len(proto) == 2


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
def test_what_is_no_array_of_numbers_is_refused_in_batch(bad):
    with pytest.raises(ValueError, match=r"batch\['a'\] must be a NumPy or JAX array"):
        DataProto.from_dict({"a": bad})


def test_scalars_are_refused_in_batch():
    with pytest.raises(ValueError, match=r"batch\['a'\] is a scalar"):
        DataProto.from_dict({"a": np.zeros((), np.float32)})


@pytest.mark.parametrize("bad", ["text", {"a": 1}, 7])
def test_what_has_no_rows_is_refused_in_non_tensors(bad):
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
    with pytest.raises(IndexError, match="index 5 is out of range for 4 rows"):
        make(4, jax_arrays)[[0, 5]]
    with pytest.raises(IndexError, match="index -5 is out of range for 4 rows"):
        make(4, jax_arrays)[-5]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64])
def test_indexes_of_any_integer_type(dtype):
    picked = make(300)[np.array([100, 0], dtype)]
    assert picked.non_tensor_batch["uid"].tolist() == ["row 100", "row 0"]
    assert make(3)[jnp.array(2)].non_tensor_batch["uid"] == "row 2"


def test_bad_indexes_name_their_fault():
    with pytest.raises(ValueError, match="bool mask of 3 does not fit 4 rows"):
        make(4)[np.array([True, False, True])]
    with pytest.raises(ValueError, match="integers or bools, got float64"):
        make(4)[np.array([0.5])]
    with pytest.raises(ValueError, match="one-dimensional"):
        make(4)[np.zeros((2, 2), int)]


@quick
@given(rows=st.integers(1, 20), data=st.data())
def test_reorder_keeps_values_in_step_and_the_inverse_restores(rows, data):
    order = data.draw(st.permutations(range(rows)))
    proto = make(rows, jax_arrays=data.draw(st.booleans()))
    moved = proto.reorder(order)
    assert moved.non_tensor_batch["uid"].tolist() == [f"row {i}" for i in order]
    assert (moved.batch["ids"][:, 0] // 3).tolist() == list(order)
    assert [len(t) for t in moved.non_tensor_batch["turns"]] == list(order)
    assert_same(moved.reorder(np.argsort(order)), proto)


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3], [[0, 1, 2]]])
def test_reorder_refuses_what_is_no_permutation(order):
    with pytest.raises(ValueError, match="permutation of 3 rows"):
        make(3).reorder(order)


@quick
@given(chunks=st.integers(1, 5), size=st.integers(1, 4), jax_arrays=st.booleans())
def test_concat_of_chunks_is_the_identity(chunks, size, jax_arrays):
    proto = make(chunks * size, jax_arrays)
    parts = proto.chunk(chunks)
    assert [len(part) for part in parts] == [size] * chunks
    assert_same(DataProto.concat(parts), proto)


@quick
@given(rows=st.integers(1, 15), size=st.integers(1, 20))
def test_concat_of_split_is_the_identity(rows, size):
    parts = make(rows).split(size)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= len(parts[-1]) <= size
    assert_same(DataProto.concat(parts), make(rows))


def test_chunks_that_do_not_divide_show_the_arithmetic():
    with pytest.raises(ValueError, match=r"10 rows do not divide into 4 equal chunks \(10 % 4 = 2"):
        make(10).chunk(4)
    with pytest.raises(ValueError, match="0 equal chunks"):
        make(10).chunk(0)


def test_concat_refuses_other_keys_dtypes_shapes_and_metadata():
    a = DataProto.from_dict({"x": np.zeros((2, 3), np.float32)}, meta_info={"t": 1})
    with pytest.raises(ValueError, match=r"batch of item 1 has keys \['y'\].*item 0 has \['x'\]"):
        DataProto.concat([a, a.rename({"x": "y"})])
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
        [part.non_tensor_batch["uid"].tolist() for part in proto.make_iterator(size, epochs, seed)]
        for seed in (5, 5, None)
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
        parts = make(32).make_iterator(32, epochs=2, seed=seed)
        return [part.non_tensor_batch["uid"].tolist() for part in parts]

    first, second = order(0)
    assert first != second
    assert first != order(1)[0]


def test_mini_batches_that_do_not_divide_raise_before_iteration():
    with pytest.raises(ValueError, match="7 rows do not divide into mini-batches of 2"):
        make(7).make_iterator(2)


# keys


def test_select_pop_and_rename():
    proto = make(2)
    assert list(proto.select(["ids"], [], []).batch) == ["ids"]
    popped, rest = proto.pop(["ids"], ["uid"], ["temperature"])
    assert (list(popped.batch), list(popped.non_tensor_batch)) == (["ids"], ["uid"])
    assert (list(rest.batch), list(rest.non_tensor_batch)) == (["score"], ["turns"])
    assert (popped.meta_info, rest.meta_info) == ({"temperature": 0.7}, {})
    assert list(proto.batch) == ["ids", "score"], "the original is as it was"
    renamed = proto.rename({"ids": "tokens", "uid": "name"})
    assert list(renamed.batch) == ["tokens", "score"]
    assert list(renamed.non_tensor_batch) == ["name", "turns"]
    swapped = proto.rename({"ids": "score", "score": "ids"})
    assert swapped.batch["ids"] is proto.batch["score"]


def test_unknown_keys_name_the_key_and_what_there_is():
    with pytest.raises(KeyError, match=r"no key 'logp' in batch; there are \['ids', 'score'\]"):
        make(2).select(["logp"])
    with pytest.raises(KeyError, match="no key 'x' in non_tensor_batch"):
        make(2).pop(non_tensor_batch_keys=["x"])
    with pytest.raises(KeyError, match="cannot rename unknown key 'x'"):
        make(2).rename({"x": "y"})
    with pytest.raises(ValueError, match="two columns the name 'score'"):
        make(2).rename({"ids": "score"})
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
    with pytest.raises(ValueError, match="union of 2 rows with 3 rows"):
        make(2).union(make(3))


# padding


@quick
@given(rows=st.integers(0, 12), divisor=st.integers(1, 8), jax_arrays=st.booleans())
def test_padding_adds_zero_rows_of_weight_zero_and_unpad_removes_them(rows, divisor, jax_arrays):
    proto = make(rows, jax_arrays)
    padded = proto.pad_to_divisor(divisor)
    extra = len(padded) - rows
    assert len(padded) % divisor == 0 and 0 <= extra < divisor
    assert padded.batch[ROW_WEIGHT].dtype == np.float32
    assert padded.batch[ROW_WEIGHT].tolist() == [1.0] * rows + [0.0] * extra
    assert not np.asarray(padded.batch["ids"][rows:]).any()
    assert padded.non_tensor_batch["uid"][rows:].tolist() == [None] * extra
    assert_same(padded.unpad(), proto)


def test_unpad_finds_padding_rows_after_a_reorder():
    padded = make(3).pad_to_divisor(4).reorder([3, 2, 0, 1])
    assert padded.unpad().non_tensor_batch["uid"].tolist() == ["row 2", "row 0", "row 1"]


def test_padding_again_keeps_the_weights_there_are():
    weighted = make(3).union(DataProto.from_dict({ROW_WEIGHT: np.float32([0.5, 1, 2])}))
    padded = weighted.pad_to_divisor(4)
    assert padded.batch[ROW_WEIGHT].tolist() == [0.5, 1, 2, 0]
    assert padded.pad_to_divisor(8).batch[ROW_WEIGHT].tolist() == [0.5, 1, 2, 0, 0, 0, 0, 0]
    assert_same(padded.unpad(), weighted)


def test_unpad_without_weights_says_what_is_missing():
    with pytest.raises(KeyError, match="unpad needs batch\\['row_weight'\\]"):
        make(2).unpad()
    with pytest.raises(ValueError, match=r"must be float32 \[rows\], got int64"):
        DataProto.from_dict({ROW_WEIGHT: np.ones(3, np.int64)}).pad_to_divisor(2)


# files

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


def typed(value):
    """A value with the type of every part spelled out, so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return ("dict", [(typed(k), typed(v)) for k, v in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [typed(v) for v in value])
    return (type(value).__name__, repr(value))


@quick
@given(
    values=st.lists(json_values, min_size=1, max_size=4),
    meta=st.dictionaries(st.text(), json_values, max_size=3),
    key=st.text(),
)
def test_saved_values_come_back_with_their_types(tmp_path_factory, values, meta, key):
    path = tmp_path_factory.mktemp("proto") / "batch.npz"
    other = key + "'"
    DataProto.from_dict({key: np.arange(len(values))}, {other: values}, meta).save(path)
    loaded = DataProto.load(path)
    assert typed(loaded.non_tensor_batch[other].tolist()) == typed(values)
    assert typed(loaded.meta_info) == typed(meta)
    assert loaded.batch[key].tolist() == list(range(len(values)))


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint16",
        "int64",
        ">i4",
        "float16",
        "float64",
        "bfloat16",
        "float8_e5m2",
        "int4",
    ],
)
def test_saved_arrays_keep_dtype_and_bits(tmp_path, dtype):
    rows = np.arange(6).reshape(2, 3).astype(np.dtype(dtype))
    arrays = {"c": rows, "fortran": np.asfortranarray(rows), "empty": rows[:, :0], "file": rows}
    DataProto.from_dict(arrays).save(tmp_path / "x")
    loaded = DataProto.load(tmp_path / "x")
    assert_same(
        loaded, DataProto.from_dict({k: np.ascontiguousarray(v) for k, v in arrays.items()})
    )


def test_jax_arrays_are_saved_from_a_mesh(tmp_path):
    proto = DataProto.from_dict({"x": jnp.arange(16, dtype=jnp.bfloat16).reshape(8, 2)})
    proto.shard(mesh_of(data=2, fsdp=4)).save(tmp_path / "x")
    assert_same(DataProto.load(tmp_path / "x"), proto)


def test_numpy_values_in_rows_and_metadata_survive(tmp_path):
    tokens = [np.array([1, 2, 3], np.int32), np.array([], np.int32)]
    proto = DataProto.from_dict(None, {"tokens": tokens}, {"n": np.float32(0.1), "$tuple": [1]})
    proto.save(tmp_path / "x")
    loaded = DataProto.load(tmp_path / "x")
    assert [(t.dtype, t.tolist()) for t in loaded.non_tensor_batch["tokens"]] == [
        (np.int32, [1, 2, 3]),
        (np.int32, []),
    ]
    assert loaded.meta_info == {"n": np.float32(0.1), "$tuple": [1]}
    assert type(loaded.meta_info["n"]) is np.float32


def test_the_file_holds_no_pickle_and_needs_none(tmp_path):
    make(3).save(tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x") as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                np.lib.format.read_array(member, allow_pickle=False)
    header = json.loads(np.load(tmp_path / "x", allow_pickle=False)["header"].tobytes())
    assert header["non_tensor_batch"]["uid"] == ["row 0", "row 1", "row 2"]


def test_values_that_cannot_be_saved_are_named_and_leave_the_old_file(tmp_path):
    path = tmp_path / "x"
    make(2).save(path)
    with pytest.raises(ValueError, match=r"non_tensor_batch\['v'\]\[1\]: it holds a object"):
        DataProto.from_dict(non_tensors={"v": [1, [object()]]}).save(path)
    with pytest.raises(ValueError, match=r"batch\['k'\].*key_data"):
        DataProto.from_dict({"k": jax.random.split(jax.random.key(0), 2)}).save(path)
    assert_same(DataProto.load(path), make(2))
    assert [p.name for p in tmp_path.iterdir()] == ["x"], "no partial file is left"


def test_broken_files_give_one_clear_error(tmp_path):
    path = tmp_path / "x"
    make(50).save(path)
    whole = path.read_bytes()
    middle = whole.index(np.arange(6, dtype=np.int32).tobytes()) + 4
    damaged = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
    for broken in (b"", b"no archive", whole[: len(whole) // 2], whole[:-1], damaged):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="x is not a readable DataProto file"):
            DataProto.load(path)
    with open(path, "wb") as file:
        np.savez(file, other=np.zeros(2))
    with pytest.raises(ValueError, match="not a readable DataProto file"):
        DataProto.load(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="not a readable DataProto file"):
        DataProto.load(path)
    with pytest.raises(FileNotFoundError):
        DataProto.load(tmp_path / "absent")


def test_another_process_reads_the_file(tmp_path):
    make(4).save(tmp_path / "x")
    script = (
        "import sys; from manus_jax.data_proto import DataProto; p = DataProto.load(sys.argv[1]);"
        "print(p.batch['ids'].sum(), p.non_tensor_batch['uid'].tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert run.stdout.strip() == "66 ['row 0', 'row 1', 'row 2', 'row 3']"


# pytree


def test_jit_maps_arrays_and_carries_host_values_without_retracing():
    traces = []

    @jax.jit
    def double(proto):
        traces.append(1)
        return jax.tree.map(lambda x: 2 * x, proto)

    out = double(make(4))
    assert_same(out.select([], None), make(4).select([]))
    assert out.batch["ids"].tolist() == (2 * np.arange(12).reshape(4, 3)).tolist()
    out.meta_info["temperature"] = 9.0
    out.non_tensor_batch["uid"][0] = "changed"
    again = double(make(4))
    assert len(traces) == 1, "equal content does not trace again"
    assert again.meta_info == {"temperature": 0.7}
    assert again.non_tensor_batch["uid"][0] == "row 0"


def test_jit_never_returns_the_host_values_of_another_batch():
    @jax.jit
    def scale(proto):
        return proto.batch["x"] * proto.meta_info["scale"], proto

    proto = DataProto.from_dict({"x": np.ones(2, np.float32)}, {"v": [1, 2]}, {"scale": 2.0})
    assert scale(proto)[0].tolist() == [2, 2]
    proto.meta_info["scale"] = 3.0
    assert scale(proto)[0].tolist() == [3, 3]
    proto.non_tensor_batch["v"][0] = True
    assert scale(proto)[1].non_tensor_batch["v"].tolist() == [True, 2]
    assert scale(proto)[1].non_tensor_batch["v"][0] is True


def test_jit_without_host_values_traces_once_for_fresh_rows():
    traces = []

    @jax.jit
    def total(proto):
        traces.append(1)
        return proto.batch["ids"].sum()

    for start in range(3):
        rows = make(8)[start : start + 4]
        assert total(rows.select(non_tensor_batch_keys=[])) == rows.batch["ids"].sum()
    assert len(traces) == 1


def test_row_operations_work_inside_jit():
    @jax.jit
    def shuffle(proto, order):
        a, b = proto[order].chunk(2)
        return DataProto.concat([b, a]).repeat(2)

    arrays = make(4).select(non_tensor_batch_keys=[])
    out = shuffle(arrays, jnp.array([3, 2, 1, 0]))
    assert (out.batch["ids"][:, 0] // 3).tolist() == [1, 1, 0, 0, 3, 3, 2, 2]
    with pytest.raises(ValueError, match=r"traced indexes cannot move the host values \['uid'"):
        shuffle(make(4), jnp.arange(4))


def test_vmap_sees_one_row_at_a_time():
    def row(proto):
        assert proto.batch["ids"].shape == (3,)
        return proto.select(["ids"]), proto.batch["ids"].sum() + proto.batch["score"]

    rows, sums = jax.vmap(row)(make(4))
    assert rows.batch["ids"].tolist() == np.arange(12).reshape(4, 3).tolist()
    assert rows.non_tensor_batch["uid"].tolist() == ["row 0", "row 1", "row 2", "row 3"]
    np.testing.assert_allclose(sums, [3, 12 + 1 / 7, 21 + 2 / 7, 30 + 3 / 7], rtol=1e-6)


def test_grad_flows_through_a_proto():
    proto = DataProto.from_dict({"x": jnp.array([1.0, 2.0])}, {"v": ["a", "b"]})
    grads = jax.grad(lambda p: (p.batch["x"] ** 2).sum())(proto)
    assert grads.batch["x"].tolist() == [2.0, 4.0]
    assert grads.non_tensor_batch["v"].tolist() == ["a", "b"]


def test_tree_map_over_two_protos_and_paths_name_the_arrays():
    total = jax.tree.map(np.add, make(3), make(3))
    assert total.batch["ids"].tolist() == (2 * np.arange(9).reshape(3, 3)).tolist()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(total)]
    assert paths == [".batch['ids']", ".batch['score']"]
    with pytest.raises(ValueError):
        jax.tree.map(np.add, make(3), make(4)[1:])


def test_device_put_with_a_sharding_keeps_values():
    mesh = mesh_of(data=4, tensor=2)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    put = jax.device_put(make(8), sharding)
    assert put.batch["ids"].sharding.is_equivalent_to(sharding, 2)
    assert put.batch["ids"].addressable_shards[0].data.shape == (2, 3)
    assert_same(jax.device_get(put), make(8))


# sharding


@pytest.mark.parametrize("jax_arrays", [False, True])
@pytest.mark.parametrize(
    ("axes", "rows_per_device"),
    [
        ({"data": 2, "fsdp": 4}, 1),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
        ({"fsdp": 4, "tensor": 2}, 2),
        ({"tensor": 8}, 8),
    ],
)
def test_shard_splits_rows_over_the_batch_axes_of_the_mesh(axes, rows_per_device, jax_arrays):
    sharded = make(8, jax_arrays).shard(mesh_of(**axes))
    for array in sharded.batch.values():
        shards = array.addressable_shards
        assert len(shards) == 8
        assert {shard.data.shape[0] for shard in shards} == {rows_per_device}
    assert_same(jax.device_get(sharded), make(8))


def test_shard_that_does_not_divide_shows_the_arithmetic():
    message = (
        r"10 rows do not divide over data=2 × fsdp=4 = 8 shards \(10 % 8 = 2\); "
        r"pad_to_divisor\(8\) first"
    )
    mesh = mesh_of(data=2, fsdp=4)
    with pytest.raises(ValueError, match=message):
        make(10).shard(mesh)
    assert len(make(10).pad_to_divisor(8).shard(mesh)) == 16


def test_arrays_are_shared_where_nothing_changed():
    proto = make(4)
    assert proto.select(["ids"]).batch["ids"] is proto.batch["ids"]
    assert np.shares_memory(proto[1:3].batch["ids"], proto.batch["ids"])
    assert proto.pad_to_divisor(2).batch["ids"] is proto.batch["ids"]
