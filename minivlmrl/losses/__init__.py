"""Losses as pure functions; importing minivlmrl.losses registers all variants of `grpo_loss`."""

from minivlmrl.losses import grpo_variants

__all__ = ["grpo_variants"]
