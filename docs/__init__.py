"""Pages, and what writes their numbers and drawings."""
