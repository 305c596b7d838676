"""Weights on their way from the learner to the servers: versions, deltas, and vLLM's plug-in."""
