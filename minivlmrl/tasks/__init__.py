"""Embedded tasks that need no downloads."""
