"""The built-in task, which needs no downloads, and the task registry."""
