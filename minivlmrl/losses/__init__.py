"""Losses as pure functions. Importing the package registers all variants of `grpo_loss`."""

from minivlmrl.losses import grpo_variants

__all__ = ["grpo_variants"]
