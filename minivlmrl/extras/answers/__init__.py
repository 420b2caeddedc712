"""Answer one prompt (chat) or a file of rows (evaluate, generate) with a trained model."""
