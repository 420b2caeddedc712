"""Losses as pure functions. Importing this package registers the variants of `grpo_loss`."""

from minivlmrl.losses import grpo_variants

__all__ = ["grpo_variants"]
