"""Losses as pure functions; importing this package registers all variants of `grpo_loss`."""

from minivlmrl.losses import grpo_variants

__all__ = ["grpo_variants"]
