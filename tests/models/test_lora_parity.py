"""Adapters against PEFT on a random transformers model: logits, gradients and files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from safetensors.numpy import load_file

from manus_jax.models import adapter_files, huggingface
from manus_jax.models.adapter_files import Adaptation
from manus_jax.models.architecture import ModelError
from manus_jax.models.lora import join
from manus_jax.models.transformer import Compute, Transformer, abstract_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def with_torch():
    global torch, peft
    torch = pytest.importorskip("torch", reason="parity with PEFT needs torch")
    peft = pytest.importorskip("peft", reason="parity with PEFT needs it")


TARGETS = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "attention": ("q_proj", "v_proj"),
}


@pytest.fixture(scope="module", params=TARGETS)
def adapted(request, tmp_path_factory):
    """A PEFT model with random adapters, its directories, and our reading of both."""
    base, adapter = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        initializer_range=0.3,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(base)
    model = transformers.Qwen3ForCausalLM.from_pretrained(base)
    targets = TARGETS[request.param]
    settings = peft.LoraConfig(
        r=4, lora_alpha=10, target_modules=list(targets), task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, settings)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2)
    model.save_pretrained(adapter)
    return model, base, adapter


def ours(base, adapter):
    params, card = huggingface.load_params(base)
    lora = adapter_files.read_adaptation(adapter).lora
    adapters = adapter_files.read_adapter(adapter, lora, card.architecture)
    graphdef, _ = abstract_model(Transformer, card.architecture, Compute(), lora)
    return params, adapters, lora, graphdef, card


def token_ids():
    return np.random.default_rng(1).integers(0, 97, (2, 60)).astype(np.int32)


def test_logits_and_gradients_match_peft(adapted):
    model, base, adapter = adapted
    params, adapters, _, graphdef, _ = ours(base, adapter)
    ids = token_ids()
    rows = np.ones_like(ids), np.broadcast_to(np.arange(60, dtype=np.int32), ids.shape)

    def loss(trained):
        logits = nnx.merge(graphdef, join(trained, params))(ids, *rows)
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        taken = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)
        return -taken.mean(), logits

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapters)
    long = torch.tensor(ids, dtype=torch.long)
    out = model(long, labels=long)
    out.loss.backward()
    np.testing.assert_allclose(logits, out.logits.detach().numpy(), atol=2e-4, rtol=0)
    assert float(value) == pytest.approx(out.loss.item(), abs=1e-5)
    compared = 0
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        layer, target = int(name.split("layers.")[1].split(".")[0]), name.split(".")[-4]
        side = "a" if "lora_A" in name else "b"
        ours_grad = grads["backbone"]["layers"][f"{target}_lora_{side}"][layer]
        scale = np.abs(p.grad.numpy()).max()
        np.testing.assert_allclose(ours_grad, p.grad.numpy(), atol=1e-4 * scale, rtol=1e-4)
        compared += 1
    assert compared == 3 * sum(x.shape[0] == 3 for x in jax.tree.leaves(adapters))


def test_a_saved_adapter_is_loaded_by_peft_with_the_same_bits(adapted, tmp_path):
    model, base, adapter = adapted
    _, adapters, lora, _, card = ours(base, adapter)
    adaptation = Adaptation(lora, str(base), "f" * 32)
    adapter_files.save_adapter(adapters, adaptation, base, card.architecture, tmp_path / "out")
    assert adapter_files.read_adaptation(tmp_path / "out") == adaptation
    theirs = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in load_file(tmp_path / "out/adapter_model.safetensors").items():
        np.testing.assert_array_equal(tensor, theirs[name])
    plain = transformers.Qwen3ForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
    ids = torch.tensor(token_ids(), dtype=torch.long)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_merged_weights_are_those_of_peft(adapted):
    _, base, adapter = adapted
    _, adapters, lora, _, _ = ours(base, adapter)
    opened, _ = huggingface.open_params(base)
    merged = adapter_files.merged_on_disk(opened, adapters, lora)
    copy = peft.PeftModel.from_pretrained(
        transformers.Qwen3ForCausalLM.from_pretrained(base), adapter
    ).merge_and_unload()
    for layer in range(3):
        expected = copy.model.layers[layer].self_attn.q_proj.weight.detach().numpy()
        read = merged["backbone"]["layers"]["q_proj"].read((layer,))
        np.testing.assert_allclose(read, expected, atol=1e-6)


def test_an_adapter_for_another_model_is_refused(adapted):
    _, base, adapter = adapted
    _, _, lora, _, card = ours(base, adapter)
    for change, message in (
        ({"num_layers": 4}, "it has no tensor .*layers.3"),
        ({"num_layers": 2}, "no place for .*layers.2"),
        ({"hidden_size": 64}, r"has shape \(4, 48\), expected \(4, 64\)"),
    ):
        other = dataclasses.replace(card.architecture, **change)
        with pytest.raises(ModelError, match=f"is an adapter for another model: .*{message}"):
            adapter_files.read_adapter(adapter, lora, other)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["r"] == lora.rank
