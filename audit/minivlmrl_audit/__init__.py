"""Audit a trainer: recompute one of its optimizer steps, and name the mistake behind each difference."""
