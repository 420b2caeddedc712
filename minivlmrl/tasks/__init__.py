"""Tasks that generate rows and images: the built-in task `shapes`, and a registry for your own tasks."""
