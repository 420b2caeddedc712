"""Convert rows of data files to tensors: read the rows, check their columns, load images, and tokenize texts."""
