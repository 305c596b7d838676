"""Qwen3, dense: norms of queries and keys."""

from manus_jax.models.families.family import Family

FAMILY = Family("qwen3", "Qwen3ForCausalLM", {"qk_norm": True}, head_dim=128)
