"""Scripts that measure time, memory and learning. A package, because an installed one may have this name."""
