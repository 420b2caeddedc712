"""Scripts that measure time, memory and learning. They form a package, because an installed one may have this name."""
