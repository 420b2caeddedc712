"""Scripts that measure time, memory and learning. Without this file, an installed package could shadow the folder."""
