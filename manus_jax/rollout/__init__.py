"""The multi-turn episode loop: prompts, action formats, players, trajectories and batches."""
