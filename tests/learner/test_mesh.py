"""The layout of devices, and the arithmetic in the messages of refused meshes."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mesh_devices import Device, gpus, tpus

from manus_jax.learner.mesh import (
    MeshError,
    batch_sharding,
    check_batch,
    check_model,
    make_mesh,
    param_spec,
)
from manus_jax.models.architecture import Architecture

QWEN_7B = Architecture("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True)


def values_along(mesh, axis, attribute):
    """The distinct values of a device attribute at each place along an axis."""
    parts = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
    return [sorted({getattr(d, attribute) for d in part.flat}) for part in parts]


def test_a_mesh_has_the_sizes_asked_for_and_one_may_be_the_rest():
    mesh = make_mesh(data=1, fsdp=-1, tensor=2, sequence=2)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "sequence": 2, "tensor": 2}
    assert mesh.shape == make_mesh(1, 2, 2, -1).shape
    # "tensor" communicates most: its devices are neighbours.
    assert [d.id for d in mesh.devices[0, 0, 0]] == [0, 1]


def test_tokens_lie_along_sequence_and_parameters_over_fsdp_and_sequence():
    mesh = make_mesh(2, 1, 2, 2)
    assert batch_sharding(mesh).spec == P(None, ("data", "fsdp"), "sequence")
    shards = lambda name, shape: jax.NamedSharding(mesh, param_spec(name, shape, mesh)).shard_shape(
        shape
    )
    assert shards("backbone/layers/q_proj", (3, 16, 32)) == (3, 8, 16)
    assert shards("backbone/layers/down_proj", (3, 32, 64)) == (3, 16, 32)
    assert shards("backbone/embed", (96, 32)) == (48, 16)
    assert shards("backbone/norm", (32,)) == (32,)


def test_slices_of_a_tpu_are_the_outer_part_of_data():
    mesh = make_mesh(data=4, fsdp=-1, devices=tpus("v5e:2x2", slices=2))
    assert dict(mesh.shape) == {"data": 4, "fsdp": 2, "sequence": 1, "tensor": 1}
    assert values_along(mesh, "data", "slice_index") == [[0], [0], [1], [1]]
    mesh = make_mesh(data=2, tensor=4, slices=2, devices=tpus("v5e:2x2", slices=2))
    assert values_along(mesh, "data", "slice_index") == [[0], [1]]


def test_neighbours_along_an_axis_of_a_tpu_lie_on_a_line_of_its_torus():
    mesh = make_mesh(fsdp=4, tensor=4, devices=tpus("v5e:4x4"))
    for axis in ("fsdp", "tensor"):
        lines = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(4, 4)
        for line in lines:
            x, y = (sorted({d.coords[i] for d in line}) for i in (0, 1))
            assert (len(x), len(y)) in {(1, 4), (4, 1)}


@pytest.mark.parametrize("per_process", [8, 1])
def test_gpu_machines_are_slices_when_asked_for(per_process):
    devices = gpus(machines=4, per_machine=8, per_process=per_process)
    mesh = make_mesh(data=4, fsdp=-1, slices=4, devices=devices[::-1])
    assert values_along(mesh, "data", "slice_index") == [[0], [1], [2], [3]]
    assert values_along(make_mesh(fsdp=32, devices=devices), "data", "slice_index") == [
        [0, 1, 2, 3]
    ]


def test_processes_are_slices_where_devices_tell_nothing_else():
    devices = [Device(i, process=i % 2) for i in range(8)]
    mesh = make_mesh(data=2, fsdp=-1, slices=2, devices=devices)
    assert values_along(mesh, "data", "process_index") == [[0], [1]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 2, "fsdp": 3}, "data=2, fsdp=3, tensor=1, sequence=1 needs 6 devices .* are 8"),
        (
            {"data": 3, "fsdp": -1},
            "8 devices are not divisible by 3; .* mesh.fsdp must have a product of 2 or",
        ),
        ({"sequence": -1, "fsdp": -1}, "only one mesh size may be -1"),
        ({"sequence": 0, "fsdp": -1}, "must be positive"),
        ({"data": 2, "fsdp": -1, "slices": 2}, r"mesh.slices = 2 .* processes \(1\)"),
        ({"data": 2, "fsdp": -1, "slices": 0}, "mesh.slices = 0"),
    ],
)
def test_meshes_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(**sizes)


def test_slices_that_do_not_divide_are_refused():
    two = gpus(machines=2, per_machine=4, per_process=4)
    with pytest.raises(MeshError, match="data=1 is not divisible by 2 slices"):
        make_mesh(fsdp=8, slices=2, devices=two)
    with pytest.raises(
        MeshError, match=r"mesh.slices = 4 .* machines \(2\) or processes \(2\) that"
    ):
        make_mesh(data=4, fsdp=-1, slices=4, devices=two)
    with pytest.raises(MeshError, match=r"unequal sizes cannot make a mesh: \[4, 2\] devices"):
        make_mesh(data=2, fsdp=-1, slices=2, devices=two[:6])
    with pytest.raises(MeshError, match=r"mesh.slices = 1 .* slices \(2\) that the 8 devices"):
        make_mesh(data=2, fsdp=-1, slices=1, devices=tpus("v5e:2x2", slices=2))


@pytest.mark.parametrize(
    ("sizes", "implementation", "message"),
    [
        ((1, 1, 8, 1), "plain", "^28 heads are not divisible by tensor=8; mesh.tensor = 4 works$"),
        ((1, 1, 7, 1), "plain", "^4 key-value heads are not divisible by tensor=7, nor"),
        (
            (1, 1, 2, 4),
            "triton",
            "^28 heads are not divisible by tensor=2 x sequence=4 = 8; "
            "mesh.tensor x mesh.sequence = 4 works$",
        ),
        (
            (1, 3, 1, 2),
            "plain",
            "^hidden size 3584 is not divisible by fsdp=3 x sequence=2 = 6; "
            "mesh.fsdp x mesh.sequence = 2 works$",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_the_arithmetic(
    sizes, implementation, message
):
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    with pytest.raises(MeshError, match=message):
        check_model(QWEN_7B, mesh, implementation)


def test_odd_models_are_refused_by_the_size_that_is_odd():
    mesh = make_mesh(tensor=4, devices=jax.devices()[:4])
    small = dict(family="qwen2", num_layers=1, num_heads=4, num_kv_heads=1, hidden_size=8)
    with pytest.raises(
        MeshError, match=r"^intermediate size 6 is .* tensor=4; mesh.tensor = 2 works$"
    ):
        check_model(Architecture(vocab_size=8, intermediate_size=6, head_dim=4, **small), mesh)
    with pytest.raises(MeshError, match=r"^vocabulary 50 is .* tensor=4; mesh.tensor = 2 works$"):
        check_model(Architecture(vocab_size=50, intermediate_size=8, head_dim=4, **small), mesh)
    with pytest.raises(
        MeshError, match=r"^key-value width 2 is .* tensor=4; mesh.tensor = 2 works$"
    ):
        check_model(Architecture(vocab_size=8, intermediate_size=8, head_dim=2, **small), mesh)


@pytest.mark.parametrize("sizes", [(1, 8, 1, 1), (1, 2, 4, 1), (1, 1, 2, 2), (1, 1, 1, 8)])
def test_a_model_that_divides_is_accepted(sizes):
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    check_model(QWEN_7B, mesh, "splash")


@pytest.mark.parametrize(
    ("rows", "length", "implementation", "message"),
    [
        (
            6,
            512,
            "plain",
            "^6 rows per micro-batch .* by data=2 x fsdp=2 = 4; set data.rows = 4 or 8$",
        ),
        (3, 512, "plain", "by data=2 x fsdp=2 = 4; set data.rows = 4$"),
        (4, 511, "plain", "^row length 511 is not divisible by sequence=2; set data.max_length"),
        (4, 384, "splash", "^row length 384 is not divisible by 128 x sequence=2 = 256; set"),
        (4, 384, "triton", "set data.max_length = 256 or 512$"),
    ],
)
def test_rows_that_do_not_divide_are_refused_with_the_arithmetic(
    rows, length, implementation, message
):
    mesh = make_mesh(2, 2, 1, 2)
    check_batch(4, 512, mesh, implementation)
    with pytest.raises(MeshError, match=message):
        check_batch(rows, length, mesh, implementation)
