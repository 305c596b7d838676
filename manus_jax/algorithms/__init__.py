"""Pure functions on arrays: advantages, losses, KL, corrections, reward allocation, recipes."""
