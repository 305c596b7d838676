"""Every model family against transformers: logits, gradients and files; and against itself on a
mesh and in the embedded engine.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import ModelSettings
from manus_jax.engines.jax_engine import JaxEngine
from manus_jax.engines.layout import make_layout
from manus_jax.engines.protocol import EngineError, Request, Sampling
from manus_jax.learner import objectives
from manus_jax.learner.mesh import MeshError, check_model, make_mesh, param_shardings
from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture, ModelError, from_hf_config, to_hf_config
from manus_jax.models.attention import AttentionKernel
from manus_jax.models.experts import load_imbalance, route
from manus_jax.models.transformer import Compute, Transformer, abstract_model, init_params
from manus_jax.training.learner_specs import check_experts

pytestmark = pytest.mark.slow

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA = {
    "layer_types": [LOCAL, GLOBAL, LOCAL],
    "sliding_window": 24,
    "query_pre_attn_scalar": 10,
}
LONGER = {
    "rope_parameters": {
        GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    }
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
CASES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA),
    "gemma3-longer": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA | LONGER),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    "qwen3-moe-raw-weights": (
        *("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        EXPERTS | {"norm_topk_prob": False, "tie_word_embeddings": True},
    ),
}
NEW = ["gemma3", "qwen3-moe"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random torch model of a family, biases and norms included, and its directory."""
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")

    @functools.cache
    def save(case):
        config, kind, settings = CASES[case]
        torch.manual_seed(0)
        config = getattr(transformers, config)(**{**SMALL, **settings})
        model = getattr(transformers, kind)(config).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" in name or "bias" in name:
                    p.add_(0.3 * torch.randn_like(p))
                if "gate.weight" in name or "experts" in name:
                    p.copy_(0.2 * torch.randn_like(p))
        directory = tmp_path_factory.mktemp(case)
        model.save_pretrained(directory)
        return model, directory

    return save


def batch_of(ids):
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return ids, jnp.ones_like(ids), positions


def tokens(rows=2, length=100, seed=1):
    return np.random.default_rng(seed).integers(1, 96, (rows, length)).astype(np.int32)


def next_token_loss(graphdef, params, ids):
    logits = nnx.merge(graphdef, params)(*batch_of(ids))
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1).mean(), logits


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_match_transformers(saved, case):
    import torch

    model, directory = saved(case)
    ids = tokens()
    model.zero_grad()
    logits = model(torch.tensor(ids, dtype=torch.long)).logits
    targets = torch.tensor(ids[:, 1:].reshape(-1), dtype=torch.long)
    torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 96), targets).backward()

    params, card = huggingface.load_params(directory)
    graphdef, _ = abstract_model(Transformer, card.architecture, Compute())
    loss = functools.partial(next_token_loss, graphdef)
    (_, ours), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, ids)
    np.testing.assert_allclose(ours, logits.detach().numpy(), atol=1e-4, rtol=0)

    expected = gradients_by_name(model)
    for name, path, index, _ in huggingface.tensor_map(card.architecture):
        gradient = functools.reduce(lambda tree, key: tree[key], path, grads)
        gradient = np.asarray(gradient)[index]
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient, expected[name], atol=2e-4 * scale, err_msg=name)


def gradients_by_name(model):
    """Gradients of a torch model under the names of its checkpoint."""
    named = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    if model.config.tie_word_embeddings:
        named.pop("lm_head.weight", None)
    for name in [name for name in named if "experts" in name]:  # all experts in one tensor
        base, _, kind = name.rpartition(".")
        for expert, gradient in enumerate(named.pop(name)):
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, matrix in zip(kinds, np.split(gradient, len(kinds)), strict=True):
                named[f"{base}.{expert}.{part}.weight"] = matrix
    return named


@pytest.mark.parametrize("case", CASES)
def test_directories_come_back_bit_for_bit(saved, case, tmp_path):
    _, source = saved(case)
    params, card = huggingface.load_params(source)
    huggingface.save_hf(params, card, tmp_path / "copy")
    for name in ("model.safetensors", "config.json"):
        assert (source / name).read_bytes() == (tmp_path / "copy" / name).read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_a_config_written_here_is_read_by_transformers_as_the_same_model(saved, case, tmp_path):
    import torch

    _, directory = saved(case)
    arch = dataclasses.replace(huggingface.read_card(directory).architecture, num_layers=3)
    assert from_hf_config(to_hf_config(arch)) == arch
    params = init_params(Transformer, arch, Compute(), seed=3)
    huggingface.save_hf(params, huggingface.new_card(arch, None), tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = tokens(rows=1, length=60)
    with torch.no_grad():
        expected = model(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    graphdef, _ = abstract_model(Transformer, arch, Compute())
    ours = next_token_loss(graphdef, params, ids)[1]
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", NEW)
def test_segments_of_a_packed_row_have_the_logits_they_have_alone(saved, case):
    params, card = huggingface.load_params(saved(case)[1])
    graphdef, _ = abstract_model(Transformer, card.architecture, Compute())
    forward = jax.jit(lambda *rows: nnx.merge(graphdef, params)(*rows))
    pieces = [tokens(1, n, seed=n)[0] for n in (70, 5, 50)]
    sizes = [len(piece) for piece in pieces] + [3]
    ids = np.concatenate([*pieces, np.zeros(3, np.int32)])[None]
    segments = np.repeat([1, 2, 3, 0], sizes).astype(np.int32)[None]
    positions = np.concatenate([np.arange(n) for n in sizes]).astype(np.int32)[None]
    packed = np.split(np.asarray(forward(ids, segments, positions))[0], np.cumsum(sizes))
    for piece, logits in zip(pieces, packed, strict=False):
        alone = forward(*batch_of(piece[None]))[0]
        np.testing.assert_allclose(logits, alone, atol=1e-4, rtol=0)


# data, fsdp, tensor, sequence
@pytest.mark.parametrize("sizes", [(8, 1, 1, 1), (1, 4, 2, 1), (1, 1, 4, 2), (2, 2, 2, 1)])
@pytest.mark.parametrize("case", NEW)
def test_loss_and_gradients_on_eight_devices_equal_those_on_one(saved, case, sizes):
    params, card = huggingface.load_params(saved(case)[1])
    ids = tokens(rows=8, length=64)

    def gradient(mesh, params):
        compute = Compute(kernel=AttentionKernel("plain", mesh))
        graphdef, _ = abstract_model(Transformer, card.architecture, compute)
        loss = lambda params, ids: next_token_loss(graphdef, params, ids)[0]
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, ids))

    expected = gradient(None, params)
    mesh = make_mesh(*sizes)
    check_model(card.architecture, mesh)
    placed = jax.device_put(params, param_shardings(params, mesh))
    chex.assert_trees_all_close(gradient(mesh, placed), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("remat", ["attention", "minimal", "none"])
@pytest.mark.parametrize("case", NEW)
def test_remat_policies_do_not_change_gradients(saved, case, remat):
    params, card = huggingface.load_params(saved(case)[1])

    def gradient(remat):
        graphdef, _ = abstract_model(Transformer, card.architecture, Compute(remat=remat))
        return jax.jit(jax.grad(lambda p: next_token_loss(graphdef, p, tokens())[0]))(params)

    chex.assert_trees_all_close(gradient(remat), gradient("full"), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cache_tokens": 8 * 256}, {"tensor": 2}])
@pytest.mark.parametrize("case", NEW)
def test_the_engine_has_the_log_probs_of_the_learner(saved, case, options):
    params, card = huggingface.load_params(saved(case)[1])
    arch, length = card.architecture, 256
    graphdef, _ = abstract_model(Transformer, arch, Compute())
    devices = jax.devices()[: options.get("tensor", 1)]
    engine = JaxEngine(arch, params, slots=8, max_length=length, devices=devices, **options)
    prompts = [tuple(tokens(1, n, seed=n)[0].tolist()) for n in (3, 90, 150)]
    try:
        asked = [
            engine.submit(Request(prompt, Sampling(max_tokens=40), 0, str(len(prompt))))
            for prompt in prompts
        ]
        made = [future.result(300) for future in asked]
    finally:
        engine.close()
    for prompt, generation in zip(prompts, made, strict=True):
        stream = np.zeros((1, length), np.int32)
        end = len(prompt) + len(generation.token_ids)
        stream[0, :end] = [*prompt, *generation.token_ids]
        live = np.arange(length)[None] < end
        batch = {
            "input_ids": stream,
            "segment_ids": live.astype(np.int32),
            "positions": np.arange(length, dtype=np.int32)[None],
            "loss_mask": live,
        }
        expected = jax.jit(lambda p, b: objectives.log_probs_of(graphdef, p, b)[0])(params, batch)[
            0
        ]
        np.testing.assert_allclose(
            generation.log_probs, expected[len(prompt) : end], atol=2e-5, rtol=0
        )


def test_experts_that_do_not_divide_the_mesh_are_refused_with_the_arithmetic(saved):
    arch = huggingface.read_card(saved("qwen3-moe")[1]).architecture
    odd = dataclasses.replace(arch, num_experts=6)
    mesh = make_mesh(data=2, tensor=4)
    with pytest.raises(MeshError, match=r"^6 experts are not divisible by tensor=4; .* = 2 works"):
        check_model(odd, mesh)
    with pytest.raises(EngineError, match=r"experts \(6\) is not divisible by it; set engine.tens"):
        make_layout(odd, jax.devices(), slots=8, max_length=64, tensor=4)


def test_a_router_computes_in_float32_and_ties_go_to_the_first_expert():
    arch = Architecture("qwen3_moe", 8, 2, 2, 1, 1, 1, 2, num_experts=3, experts_per_token=2)
    router = jnp.array([[1.0, 0.0], [1.0, 2.0**-12], [0.0, 1.0]])
    x = jnp.array([[1.0, 1.0], [1.0, -1.0]], jnp.bfloat16)
    weights, chosen = route(arch, router, x)
    # Logits are 1, 1 + 2^-12, 1 and 1, 1 - 2^-12, -1; bfloat16 has 8 bits.
    assert chosen.tolist() == [[1, 0], [0, 1]]
    high = 1 / (1 + np.exp(-(2.0**-12)))
    np.testing.assert_allclose(weights, [[high, 1 - high]] * 2, rtol=1e-6)


def test_the_load_balancing_loss_is_that_of_transformers_and_excludes_padding():
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    arch = Architecture("qwen3_moe", 8, 6, 2, 1, 1, 1, 2, num_experts=5, experts_per_token=2)
    rng = np.random.default_rng(0)
    router, x = rng.normal(size=(5, 6)), rng.normal(size=(2, 30, 6))
    real = np.arange(30) < np.array([[30], [17]])
    ours = load_imbalance(arch, *(jnp.asarray(y, jnp.float32) for y in (router, x)), real)
    logits = torch.tensor((x @ router.T).reshape(-1, 5))
    expected = load_balancing_loss_func((logits,), 5, 2, torch.tensor(real.astype(np.int64)))
    np.testing.assert_allclose(ours, expected.item() / 2, rtol=1e-5)  # theirs is 2 if balanced
    equal = load_imbalance(arch, jnp.zeros((5, 6)), jnp.ones((1, 4, 6)), jnp.ones((1, 4)))
    np.testing.assert_allclose(equal, 1.0, rtol=1e-6)


def test_the_load_balancing_loss_is_added_with_its_weight(saved):
    params, card = huggingface.load_params(saved("qwen3-moe")[1])
    graphdef, _ = abstract_model(Transformer, card.architecture, Compute())
    ids, segments, positions = batch_of(jnp.asarray(tokens()))
    batch = {"input_ids": ids, "segment_ids": segments, "positions": positions}
    batch |= {"loss_mask": segments > 0, "loss_weights": jnp.full(ids.shape, 0.25 / ids.size)}
    plain, stats = objectives.supervised(graphdef)(params, batch)
    loss, same = objectives.supervised(graphdef, 0.5)(params, batch)
    imbalance = stats["load_imbalance"] / stats["tokens"]
    assert same["load_imbalance"] == stats["load_imbalance"] and imbalance > 1.0
    np.testing.assert_allclose(loss - plain, 0.5 * 0.25 * imbalance, rtol=1e-4)


def test_a_weight_for_experts_is_refused_if_the_model_has_none(saved):
    arch = huggingface.read_card(saved("gemma3")[1]).architecture
    with pytest.raises(ConfigError, match=r"load_balancing = 0.1 is not read: gemma3_text has no"):
        check_experts(ModelSettings(load_balancing=0.1), arch)


def test_the_gpu_kernel_refuses_sliding_windows_in_one_line(saved):
    arch = huggingface.read_card(saved("gemma3")[1]).architecture
    with pytest.raises(ModelError, match=r"sliding-window.*set compute.attention = 'plain'$"):
        check_model(arch, make_mesh(8), "triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [LOCAL] * 2}, "layer_types must be 3 of"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types must be 3 of"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is set"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": "all"}, "'all' is not a whole number"),
        ({"rope_parameters": {GLOBAL: {"rope_type": "yarn"}}}, "rope scaling 'yarn'"),
        ({"model_type": "gemma3"}, "its text model can be saved as gemma3_text"),
    ],
)
def test_settings_of_gemma_that_are_not_computed_are_refused(change, message):
    config = {**SMALL, **GEMMA, "model_type": "gemma3_text", **change}
    with pytest.raises(ModelError, match=message):
        from_hf_config(config)
