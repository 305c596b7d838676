"""manus_jax: reinforcement learning of LLM agents, native to JAX."""

import os

from envs.interrupts import report_early_interrupts

# transformers would print on every import that torch is missing, which the learner does not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

report_early_interrupts()
