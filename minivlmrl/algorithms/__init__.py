"""Every algorithm but the book's GRPO: SFT, the GRPO family, preferences, reward model, PPO."""
