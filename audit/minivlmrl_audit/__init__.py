"""Audit a trainer: recompute an optimizer step, and name the mistake behind each difference."""
