"""Losses as pure functions; importing this package registers all `grpo_loss` variants."""

from minivlmrl.losses import grpo_variants

__all__ = ["grpo_variants"]
