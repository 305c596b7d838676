"""Small DataProtos, and how to compare them without the code under test."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from jax.sharding import AxisType

from manus_jax.data_proto import DataProto

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
