"""The Flax transformer, the critic, attention, token log-probs and Hugging Face files."""
