"""Tasks that generate their own rows and images: the built-in task `shapes`, and a registry for users' own tasks."""
