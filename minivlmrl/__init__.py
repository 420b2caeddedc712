"""Reinforcement learning for vision-language models, from scratch: files -> tokens ->
log-probabilities -> steps."""
