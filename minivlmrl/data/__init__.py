"""Convert data files to tensors: read and check rows, load images, tokenize text."""
