"""Scripts that measure time, memory and learning.

Without this file, an installed package named benchmarks could be imported instead.
"""
