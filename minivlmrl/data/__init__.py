"""From a line of a file to tensors: row_files, formats, media, file_dataset, rows, processor."""
