"""Losses as pure functions of log-probabilities, one file a family. Each file imports torch alone: copy one out."""
