"""Scripts that measure time, memory and learning. A package, so that a different installed `benchmarks` is not imported."""
