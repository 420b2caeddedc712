"""Losses as pure functions. The package registers the variants, so that grpo_loss knows them all."""

from minivlmrl.losses import grpo_variants

__all__ = ["grpo_variants"]
