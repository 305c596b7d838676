"""Model families, one file each: how a family's `config.json` and tensors map to an `Architecture`.

A family names its tensors and states what its models have in common; the sizes are read from
`config.json`. To add one, write a file like those here and import it below. What the decoder does
not compute yet needs a switch in `Architecture` and a line in `models/transformer.py`.
"""

from manus_jax.models.families import gemma3, llama, qwen2, qwen3, qwen3_moe
from manus_jax.models.families.family import Family
from manus_jax.registry import Registry

FAMILIES: Registry[Family] = Registry("model family")
for _module in (qwen2, qwen3, llama, gemma3, qwen3_moe):
    FAMILIES.add(_module.FAMILY)
