"""What a run needs around its trainers: options, rows, evaluation, optimizer, metrics."""
