"""Algorithms, one file each. All are two methods, batches() and loss(); train.py has their names."""
