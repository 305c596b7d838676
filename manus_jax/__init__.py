"""manus_jax: reinforcement learning of LLM agents, native to JAX."""

import os

from envs.interrupts import report_early_interrupts

# transformers advises on every import that it found no torch, which is as it should be here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

report_early_interrupts()
