"""Run directories: checkpoints and resume, metrics, logging, the training loops."""
