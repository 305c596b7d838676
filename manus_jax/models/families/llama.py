"""Llama 3, and models of the same shape such as SmolLM2."""

from manus_jax.models.families.family import Family

FAMILY = Family("llama", "LlamaForCausalLM")
