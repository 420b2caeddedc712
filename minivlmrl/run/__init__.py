"""The training run around the trainers: setup, loop, optimizer, checkpoints, metrics, evaluation."""
