"""What a run needs around its algorithm: options, rows, evaluation, optimizer, metrics."""
