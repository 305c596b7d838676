"""DataProto on disk: every value with its type, and no pickle."""

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
from data_protos import assert_same, make, mesh_of, quick
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from manus_jax.data_proto import DataProto

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
    sharding = NamedSharding(mesh_of(data=2, fsdp=4), PartitionSpec(("data", "fsdp")))
    jax.device_put(proto, sharding).save(tmp_path / "x")
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


@pytest.mark.slow
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


def test_bytes_are_the_file_without_a_disk():
    proto = make(3)
    assert_same(DataProto.from_bytes(proto.to_bytes()), proto)
    with pytest.raises(ValueError, match="the message is not a readable DataProto"):
        DataProto.from_bytes(proto.to_bytes()[:-40])
