"""A recipe's sampler: filters, stop strings, pieces of a token budget, steps as CUDA graphs."""
