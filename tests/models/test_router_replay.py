"""Replayed experts: the model computes each token with the given experts."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from manus_jax.learner.mesh import make_mesh, param_shardings
from manus_jax.models import huggingface
from manus_jax.models.attention import AttentionKernel
from manus_jax.models.transformer import Compute, Transformer, abstract_model

pytestmark = pytest.mark.slow
LAYERS, PER_TOKEN, EXPERTS = 3, 2, 8
SETTINGS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
}
RNG = np.random.default_rng(1)
IDS = RNG.integers(1, 96, (4, 32)).astype(np.int32)
CHOSEN = RNG.permuted(np.tile(np.arange(EXPERTS), (4, 32, LAYERS, 1)), axis=-1)[..., :PER_TOKEN]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SETTINGS)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_()
    directory = tmp_path_factory.mktemp("moe")
    model.save_pretrained(directory)
    return model, directory


def choosing(gate, experts):
    """The forward pass of transformers' router, with these experts in place of its own."""
    import torch

    def forward(hidden):
        probs = torch.softmax(torch.nn.functional.linear(hidden, gate.weight), dim=-1)
        weights = probs.gather(-1, experts)
        return None, weights / weights.sum(dim=-1, keepdim=True), experts

    return forward


def loss_of(graphdef, params, ids, experts):
    model = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    x = model.backbone(ids, jnp.ones_like(ids), positions, experts)
    logits = x @ model.head().T
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1).mean(), logits


def test_logits_and_gradients_are_those_of_transformers_with_the_same_experts(saved, monkeypatch):
    import torch

    model, directory = saved
    for number, layer in enumerate(model.model.layers):
        experts = torch.tensor(CHOSEN[:, :, number].reshape(-1, PER_TOKEN))
        monkeypatch.setattr(layer.mlp.gate, "forward", choosing(layer.mlp.gate, experts))
    targets = torch.tensor(IDS[:, 1:].reshape(-1), dtype=torch.long)
    expected = model(torch.tensor(IDS, dtype=torch.long)).logits
    torch.nn.functional.cross_entropy(expected[:, :-1].reshape(-1, 96), targets).backward()

    params, card = huggingface.load_params(directory)
    graphdef, _ = abstract_model(Transformer, card.architecture, Compute())
    loss = jax.jit(jax.value_and_grad(functools.partial(loss_of, graphdef), has_aux=True))
    (_, logits), grads = loss(params, IDS, CHOSEN.astype(np.int16))
    np.testing.assert_allclose(logits, expected.detach().numpy(), atol=1e-4, rtol=0)
    routers = grads["backbone"]["layers"]["router"]
    for number, layer in enumerate(model.model.layers):
        theirs = layer.mlp.gate.weight.grad.numpy()
        np.testing.assert_allclose(routers[number], theirs, atol=1e-6, rtol=1e-3)


def test_unknown_experts_are_the_models_own(saved):
    params, card = huggingface.load_params(saved[1])
    graphdef, _ = abstract_model(Transformer, card.architecture, Compute())
    logits = jax.jit(lambda experts: loss_of(graphdef, params, IDS, experts)[1])
    mixed = np.where(np.arange(32)[:, None, None] < 20, -1, CHOSEN).astype(np.int16)
    own = logits(None)
    chex.assert_trees_all_close(logits(np.full_like(mixed, -1)), own, atol=1e-6)
    replayed = logits(mixed)
    np.testing.assert_allclose(replayed[:, :20], own[:, :20], atol=1e-6)
    assert (np.abs(replayed - own)[:, 20:].max(axis=-1) > 1e-2).all()


@pytest.mark.parametrize("sizes", [(1, 4, 2, 1), (1, 1, 4, 2)])  # data, fsdp, tensor, sequence
def test_experts_are_replayed_alike_on_eight_devices_and_on_one(saved, sizes):
    params, card = huggingface.load_params(saved[1])

    def gradient(mesh, params):
        compute = Compute(kernel=AttentionKernel("plain", mesh))
        graphdef, _ = abstract_model(Transformer, card.architecture, compute)
        loss = lambda params: loss_of(graphdef, params, IDS, CHOSEN.astype(np.int16))[0]
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params))

    mesh = make_mesh(*sizes)
    placed = jax.device_put(params, param_shardings(params, mesh))
    chex.assert_trees_all_close(
        gradient(mesh, placed), gradient(None, params), atol=2e-5, rtol=2e-4
    )
