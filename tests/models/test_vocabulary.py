"""Sums over devices of the LM head's gradient, against numpy."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manus_jax.learner.mesh import make_mesh
from manus_jax.models.vocabulary import HIDDEN_AXES, ring_scatter


@pytest.mark.parametrize(
    ("sizes", "vocab"), [((1, 8, 1, 1), 300), ((1, 2, 1, 4), 64), ((2, 2, 1, 2), 512)]
)
def test_a_ring_gives_each_device_its_columns_of_the_sum(sizes, vocab):
    mesh = make_mesh(*sizes)
    parts = mesh.shape["fsdp"] * mesh.shape["sequence"]
    x = np.random.default_rng(0).integers(-9, 9, (parts, vocab, 4 * parts)).astype(np.float32)
    scatter = jax.shard_map(
        lambda x: ring_scatter(x[0]),
        mesh=mesh,
        in_specs=P(HIDDEN_AXES),
        out_specs=P(None, HIDDEN_AXES),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(scatter)(x), x.sum(0))
