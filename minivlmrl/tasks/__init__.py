"""The embedded task, which needs no downloads, and the table of tasks."""
