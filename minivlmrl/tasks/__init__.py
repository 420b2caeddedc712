"""The built-in task, which needs no downloads, and the registry of tasks."""
