"""Rows split over "sequence" give the update of one device, for the policy and for the critic."""

import functools
import re

import chex
import jax
import numpy as np
import optax
import pytest
from sequences import batch_of, packed_arrays, ragged_sequences, weighted

from manus_jax.algorithms.recipes import RECIPES, policy_loss
from manus_jax.learner import objectives
from manus_jax.learner.mesh import make_mesh
from manus_jax.learner.update import init_state, make_update, put_batch
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import AttentionKernel
from manus_jax.models.transformer import Compute, Critic, Transformer, abstract_model, init_params

pytestmark = pytest.mark.slow

VOCAB, HIDDEN, LENGTH = 96, 32, 64
ARCH = Architecture("qwen3", VOCAB, HIDDEN, 64, 2, 8, 2, 8, qk_norm=True, initializer_range=0.2)
MATRIX_ROWS = {VOCAB, VOCAB // 2, VOCAB // 4}  # of the vocabulary on a device; no other size
# data, fsdp, tensor, sequence; there are two key-value heads, so tensor=4 repeats them.
MESHES = [(1, 1, 1, 8), (2, 1, 1, 4), (1, 2, 2, 2), (1, 1, 4, 2), (2, 2, 2, 1)]


@functools.cache
def initial(kind):
    params = jax.device_get(init_params(kind, ARCH, Compute(), 0))
    if kind is Critic:
        # A value head of zeros would give the backbone no gradient.
        params["value_head"] = np.linspace(-1, 1, HIDDEN, dtype=np.float32)
    return params


def objective_on(mesh, kind):
    graphdef, shapes = abstract_model(kind, ARCH, Compute(kernel=AttentionKernel("plain", mesh)))
    if kind is Critic:
        return objectives.critic(graphdef, 0.5), shapes
    loss = policy_loss(RECIPES["grpo"])
    return objectives.policy(graphdef, loss, 0.7, with_entropy=True), shapes


def updated(kind, sizes):
    """Parameters and metrics after an update, and the compiled program.

    Plain SGD shows the gradient itself.
    """
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    objective, shapes = objective_on(mesh, kind)
    optimizer = optax.sgd(0.5)
    # Segments begin and end anywhere, so most cross a border between two devices.
    sequences = ragged_sequences(count=13, longest=LENGTH, vocabulary=VOCAB)
    packed = packed_arrays(weighted(batch_of(sequences)), 4, LENGTH)
    assert packed[1] == 2
    state = init_state(initial(kind), optimizer, mesh)
    batch = put_batch(*packed, mesh)
    program = make_update(objective, optimizer, mesh, shapes).lower(state, *batch).compile()
    state, metrics = program(state, *batch)
    assert float(metrics["grad_norm"]) > 1e-2
    metrics = {k: float(v) for k, v in metrics.items()}
    return jax.device_get(state.params), metrics, program.as_text()


@pytest.fixture(scope="module")
def one_device():
    return {kind: updated(kind, (1, 1, 1, 1)) for kind in (Transformer, Critic)}


@pytest.mark.parametrize("sizes", MESHES)
def test_the_policy_update_is_that_of_one_device(sizes, one_device):
    params, metrics, program = updated(Transformer, sizes)
    chex.assert_trees_all_close(params, one_device[Transformer][0], atol=2e-6, rtol=2e-5)
    chex.assert_trees_all_close(metrics, one_device[Transformer][1], rtol=1e-4)
    moved = list(collectives(program))
    assert any(MATRIX_ROWS & set(shape[:1]) for shape, _ in moved), "the head is gathered"
    for shape, place in moved:
        assert not MATRIX_ROWS & set(shape[1:]), f"logits travel: {shape} in {place}"
        if "shard_map/while" in place:
            assert not MATRIX_ROWS & set(shape), f"the head's gradient in a loop: {shape}"


@pytest.mark.parametrize("sizes", [(1, 1, 1, 4), (2, 1, 2, 2)])
def test_the_critic_update_is_that_of_one_device(sizes, one_device):
    params, metrics, _ = updated(Critic, sizes)
    chex.assert_trees_all_close(params, one_device[Critic][0], atol=2e-6, rtol=2e-5)
    chex.assert_trees_all_close(metrics, one_device[Critic][1], rtol=1e-4)


def collectives(program):
    """Shapes that collectives of a compiled program give, and the names of their places."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for line in program.splitlines():
        if found := re.search(rf" = (.*?) (?:{kinds})(?:-start)?\(", line):
            place = re.search(r'op_name="([^"]*)"', line)
            for dims in re.findall(r"\w+\[([\d,]*)\]", found[1]):
                shape = tuple(int(d) for d in dims.split(",") if d)
                yield shape, place[1] if place else ""
