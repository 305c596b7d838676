"""The multi-turn episode loop, prompts, action parsers, and the engines that generate."""
