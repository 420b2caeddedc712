"""Losses as pure functions of tensors, and TRL's recorded values to hold a loss against."""
