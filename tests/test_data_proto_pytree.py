"""DataProto as a pytree: under jit, vmap and grad, and split over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from data_protos import assert_same, make, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from manus_jax.data_proto import DataProto


def test_host_values_cause_no_retracing():
    traces = []

    @jax.jit
    def double(proto):
        traces.append(1)
        return jax.tree.map(lambda x: 2 * x, proto)

    for number in range(4):
        rows = DataProto.from_dict(
            {"ids": np.arange(3) + number},
            {"uid": [f"{number}.{row}" for row in range(3)]},
            {"step": number, "nested": {"a": [number]}},
        )
        assert double(rows).batch["ids"].tolist() == (2 * (np.arange(3) + number)).tolist()
        assert rows.meta_info["step"] == number
    assert len(traces) == 1
    double(DataProto.from_dict({"ids": np.arange(3)}))  # other keys, and none at all
    assert len(traces) == 1


def test_jit_never_returns_the_host_values_of_another_batch():
    seen = []

    @jax.jit
    def same(proto):
        seen.append((list(proto.non_tensor_batch), list(proto.meta_info)))
        return proto

    for value in (1, 2):
        proto = DataProto.from_dict({"x": np.ones(2)}, {"v": [value, value]}, {"scale": value})
        out = same(proto)
        assert not out.non_tensor_batch and not out.meta_info
        both = proto.union(DataProto.from_dict({"doubled": 2 * out.batch["x"]}))
        assert both.non_tensor_batch["v"].tolist() == [value, value]
    assert seen == [([], [])]


def test_row_operations_work_inside_jit():
    @jax.jit
    def shuffle(proto, order):
        a, b = proto[order].chunk(2)
        return DataProto.concat([b, a]).repeat(2)

    arrays = make(4).select(non_tensor_batch_keys=[])
    out = shuffle(arrays, jnp.array([3, 2, 1, 0]))
    assert (out.batch["ids"][:, 0] // 3).tolist() == [1, 1, 0, 0, 3, 3, 2, 2]
    assert not shuffle(make(4), jnp.arange(4)).non_tensor_batch


def test_vmap_sees_one_row_at_a_time():
    def row(proto):
        assert proto.batch["ids"].shape == (3,)
        return proto.select(["ids"]), proto.batch["ids"].sum() + proto.batch["score"]

    rows, sums = jax.vmap(row)(make(4))
    assert rows.batch["ids"].tolist() == np.arange(12).reshape(4, 3).tolist()
    assert not rows.non_tensor_batch
    np.testing.assert_allclose(sums, [3, 12 + 1 / 7, 21 + 2 / 7, 30 + 3 / 7], rtol=1e-6)


def test_grad_flows_through_a_proto():
    proto = DataProto.from_dict({"x": jnp.array([1.0, 2.0])}, {"v": ["a", "b"]})
    grads = jax.grad(lambda p: (p.batch["x"] ** 2).sum())(proto)
    assert grads.batch["x"].tolist() == [2.0, 4.0]


def test_tree_map_over_two_protos_and_paths_name_the_arrays():
    total = jax.tree.map(np.add, make(3), make(3))
    assert total.batch["ids"].tolist() == (2 * np.arange(9).reshape(3, 3)).tolist()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(total)]
    assert paths == [".batch['ids']", ".batch['score']"]
    assert total.non_tensor_batch["uid"].tolist() == ["row 0", "row 1", "row 2"]


def test_device_put_with_a_sharding_keeps_values():
    mesh = mesh_of(data=4, tensor=2)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    put = jax.device_put(make(8), sharding)
    assert put.batch["ids"].sharding.is_equivalent_to(sharding, 2)
    assert put.batch["ids"].addressable_shards[0].data.shape == (2, 3)
    assert_same(jax.device_get(put), make(8))
