"""Shared by the AgentGym and vLLM pools: server health, back-off, processes. Imports no JAX."""
