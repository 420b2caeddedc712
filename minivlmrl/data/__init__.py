"""From a line of a file to tensors: row_files, columns, read_row, media, file_dataset, rows, processor."""
