"""Tasks, which generate rows and images: the built-in `shapes`, and a registry for your own."""
