"""What describes a model family, and the tensor names that most families share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

ATTENTION_NAMES = {
    **{f"{n}_proj": f"self_attn.{n}_proj.weight" for n in "qkvo"},
    **{f"{n}_bias": f"self_attn.{n}_proj.bias" for n in "qkv"},
    **{f"{n}_norm": f"self_attn.{n}_norm.weight" for n in "qk"},
}
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    **ATTENTION_NAMES,
    **{f"{n}_proj": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
}


class Unsupported(ValueError):
    """A setting in `config.json` that the decoder does not implement; the message names it."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    Args:
      name: the `model_type` in `config.json`.
      hf_class: the class of transformers, as in `architectures`.
      switches: the fields of `Architecture` that are the same for all models of the family.
      layer_names: the Hugging Face name of each parameter of a layer, without "model.layers.N.";
        "{}" is the number of an expert.
      read: the fields of `Architecture` that this family reads from `config.json` in its own way;
        raises Unsupported for settings that the decoder does not implement.
      write: entries of `config.json` from an `Architecture`, in addition to the common ones.
      head_dim: the head size if `config.json` has none; None: hidden size / heads.
    """

    name: str
    hf_class: str
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layer_names: Mapping[str, str] = dataclasses.field(default_factory=lambda: LAYER_NAMES)
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    write: Callable[[Any], dict[str, Any]] | None = None
    head_dim: int | None = None


def refuse(config: dict[str, Any], *keys: str) -> None:
    """Raises Unsupported if one of the keys is set."""
    for key in keys:
        if config.get(key):
            raise Unsupported(f"{key} is set, but is not supported")
