"""The models. Importing minivlmrl.model also speeds up how Linux reuses the memory of deleted tensors."""

import ctypes
import os

# By default, freed memory goes back to Linux, which zeros it before it is used again: 1 to 4 % of a step's time.
if os.name == "posix":
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes of free memory to keep
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks are returned at once
