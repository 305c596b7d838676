"""Sizes of public models, as in their `config.json`, so that planning needs no model files."""

from pathlib import Path
from typing import Any

from manus_jax.models.architecture import (
    Architecture,
    ModelError,
    from_hf_config,
    read_hf_config,
    read_json_object,
)
from manus_jax.models.families import FAMILIES

# By prefix of the name, the longest first: the family and what else its models have in common.
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2.5": {"family": "qwen2", "rope_theta": 1e6},
    "qwen3-30b-a3b": {
        "family": "qwen3_moe",
        "rope_theta": 1e6,
        "num_experts": 128,
        "experts_per_token": 8,
    },
    "qwen3": {"family": "qwen3", "rope_theta": 1e6},
    "llama": {"family": "llama", "rope_theta": 5e5},
    "gemma-3": {"family": "gemma3_text", "rope_theta": 1e6},
}
# Gemma 3: the sliding window, and what queries are scaled by
_WINDOWS = {
    "gemma-3-270m": (512, 256),
    "gemma-3-1b": (512, 256),
    "gemma-3-4b": (1024, 256),
    "gemma-3-12b": (1024, 256),
    "gemma-3-27b": (1024, 168),
}
# vocabulary, hidden, MLP, layers, heads, key-value heads, head size, LM head tied to embedding
_SIZES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "qwen2.5-0.5b": (151_936, 896, 4_864, 24, 14, 2, 64, True),
    "qwen2.5-1.5b": (151_936, 1_536, 8_960, 28, 12, 2, 128, True),
    "qwen2.5-3b": (151_936, 2_048, 11_008, 36, 16, 2, 128, True),
    "qwen2.5-7b": (152_064, 3_584, 18_944, 28, 28, 4, 128, False),
    "qwen2.5-14b": (152_064, 5_120, 13_824, 48, 40, 8, 128, False),
    "qwen2.5-32b": (152_064, 5_120, 27_648, 64, 40, 8, 128, False),
    "qwen3-0.6b": (151_936, 1_024, 3_072, 28, 16, 8, 128, True),
    "qwen3-1.7b": (151_936, 2_048, 6_144, 28, 16, 8, 128, True),
    "qwen3-4b": (151_936, 2_560, 9_728, 36, 32, 8, 128, True),
    "qwen3-8b": (151_936, 4_096, 12_288, 36, 32, 8, 128, False),
    "qwen3-14b": (151_936, 5_120, 17_408, 40, 40, 8, 128, False),
    "qwen3-32b": (151_936, 5_120, 25_600, 64, 64, 8, 128, False),
    "qwen3-30b-a3b": (151_936, 2_048, 768, 48, 32, 4, 128, False),
    "gemma-3-270m": (262_144, 640, 2_048, 18, 4, 1, 256, True),
    "gemma-3-1b": (262_144, 1_152, 6_912, 26, 4, 1, 256, True),
    "gemma-3-4b": (262_208, 2_560, 10_240, 34, 8, 4, 256, True),
    "gemma-3-12b": (262_208, 3_840, 15_360, 48, 16, 8, 256, True),
    "gemma-3-27b": (262_208, 5_376, 21_504, 62, 32, 16, 128, True),
    "llama-3.2-1b": (128_256, 2_048, 8_192, 16, 32, 8, 64, True),
    "llama-3.2-3b": (128_256, 3_072, 8_192, 28, 24, 8, 128, True),
    "llama-3.1-8b": (128_256, 4_096, 14_336, 32, 32, 8, 128, False),
}
_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "tie_embeddings"),
)


def find_architecture(name: str) -> Architecture:
    """A public model by name, or the architecture in a `config.json` or a directory with one."""
    key = name.lower().split("/")[-1].removesuffix("-instruct").removesuffix("-it")
    if key in _SIZES:
        common = next(f for prefix, f in _FAMILIES.items() if key.startswith(prefix))
        sizes: dict[str, Any] = dict(zip(_FIELDS, _SIZES[key], strict=True))
        if key in _WINDOWS:
            window, scalar = _WINDOWS[key]
            local = tuple((layer + 1) % 6 > 0 for layer in range(sizes["num_layers"]))
            sizes |= {"sliding_window": window, "local_layers": local}
            sizes |= {"query_scale": scalar**-0.5, "embed_scale": sizes["hidden_size"] ** 0.5}
        return Architecture(**common, **sizes, **FAMILIES[common["family"]].switches)
    path = Path(name).expanduser()
    if path.is_dir():
        return from_hf_config(read_hf_config(path), str(path / "config.json"))
    if path.is_file():
        return from_hf_config(read_json_object(path), str(path))
    raise ModelError(
        f"unknown architecture {name!r}: give a config.json, a directory with one, or one of "
        + ", ".join(_SIZES)
    )
