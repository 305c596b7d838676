"""DataProto as a pytree: under jit, vmap and grad, and split over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_protos import assert_same, make, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from manus_jax.data_proto import DataProto


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
