"""Scripts that measure time, memory and learning.

This file makes benchmarks/ a package, because another package of this name may be installed.
"""
