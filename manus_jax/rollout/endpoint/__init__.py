"""An OpenAI-compatible endpoint that records the exact tokens of every request."""
