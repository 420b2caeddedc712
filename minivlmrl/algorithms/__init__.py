"""Every algorithm but GRPO, which is in the book: SFT, the GRPO family, preferences, reward model,
PPO."""
