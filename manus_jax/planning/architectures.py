"""Sizes of public models, as in their `config.json`, so that planning needs no model files."""

import json
from pathlib import Path

from manus_jax.models.architecture import Architecture, ModelError, from_hf_config, read_hf_config

_FAMILIES = {
    "qwen2.5": {"family": "qwen2", "rope_theta": 1e6, "qkv_bias": True},
    "qwen3": {"family": "qwen3", "rope_theta": 1e6, "qk_norm": True},
    "llama": {"family": "llama", "rope_theta": 5e5},
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
    key = name.lower().removeprefix("qwen/").removesuffix("-instruct")
    if key in _SIZES:
        family = next(f for prefix, f in _FAMILIES.items() if key.startswith(prefix))
        sizes = dict(zip(_FIELDS, _SIZES[key], strict=True))
        return Architecture(**family, **sizes)  # type: ignore[arg-type]
    path = Path(name).expanduser()
    if path.is_dir():
        return from_hf_config(read_hf_config(path), str(path / "config.json"))
    if path.is_file():
        try:
            return from_hf_config(json.loads(path.read_text()), str(path))
        except json.JSONDecodeError as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from None
    raise ModelError(
        f"unknown architecture {name!r}: give a config.json, a directory with one, or one of "
        + ", ".join(_SIZES)
    )
