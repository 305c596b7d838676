"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from manus_jax.models.families.family import Family

FAMILY = Family("qwen2", "Qwen2ForCausalLM", {"qkv_bias": True})
