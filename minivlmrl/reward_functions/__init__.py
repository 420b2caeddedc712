"""Rewards beyond text: boxes."""
