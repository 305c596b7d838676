"""The Flax transformer, its critic, token log-probs, and Hugging Face names."""
