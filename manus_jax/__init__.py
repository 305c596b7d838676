"""manus_jax: reinforcement learning of LLM agents, native to JAX."""
