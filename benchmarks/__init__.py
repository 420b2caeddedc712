"""Scripts that measure time, memory and learning; without this file, an installed package could be imported instead."""
