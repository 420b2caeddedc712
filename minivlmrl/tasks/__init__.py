"""The built-in task `shapes`, whose images are generated, and the registry for more tasks."""
