"""The layers that get adapters, and invalid settings."""

import pytest

from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import LoraSettings
from manus_jax.models.architecture import Architecture, ModelError
from manus_jax.models.lora import make_lora

ARCH = Architecture("qwen3", 64, 32, 48, 2, 4, 2, 8, qk_norm=True)


def test_all_linear_layers_or_those_named_in_the_order_of_the_model():
    assert make_lora(LoraSettings(), ARCH) is None
    every = make_lora(LoraSettings(rank=4), ARCH)
    assert every.targets == tuple(f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down"))
    some = make_lora(LoraSettings(rank=4, alpha=6, target_modules=("up_proj", "k_proj")), ARCH)
    assert some.scale == 1.5
    assert some.layer_shapes(ARCH) == {
        "k_proj_lora_a": (4, 32),
        "k_proj_lora_b": (16, 4),
        "up_proj_lora_a": (4, 32),
        "up_proj_lora_b": (48, 4),
    }


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ({"rank": 0}, "lora.rank = 0 must be at least 1"),
        ({"alpha": 8}, "lora.alpha is set and lora.rank is not"),
        ({"rank": 4, "target_modules": ()}, "lora.target_modules is empty"),
    ],
)
def test_settings_without_adapters_are_refused(bound, message):
    with pytest.raises(ConfigError, match=message):
        LoraSettings(**bound)


@pytest.mark.parametrize("name", ["query", "embed_tokens", "q_norm"])
def test_a_target_that_matches_nothing_is_refused(name):
    settings = LoraSettings(rank=4, target_modules=("q_proj", name))
    with pytest.raises(ModelError, match=f"lora.target_modules: '{name}' matches no linear layer"):
        make_lora(settings, ARCH)
