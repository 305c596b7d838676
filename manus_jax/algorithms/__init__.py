"""Pure maths on arrays: advantages, losses, KL, corrections, reward allocation, recipes."""
