"""Scripts that measure time, memory and learning. They form a package, because another package may have this name."""
