"""The models. Importing minivlmrl.model also lets malloc keep freed memory, which saves time on Linux."""

import ctypes
import os

# By default, Linux takes freed memory back and zeros it for the next use. Zeroing takes 1 to 4 % of a step's time.
if os.name == "posix":
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes of free memory to keep
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks are returned at once
