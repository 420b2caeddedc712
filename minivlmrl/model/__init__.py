"""The models. Importing minivlmrl.model also tells glibc to keep freed memory in the process."""

import ctypes
import os

# By default, glibc (the C library of Linux) returns freed memory to the operating system, which must overwrite the
# memory with zeros before the next training step can use it. The zeroing took 1 to 4 % of the time of a step.
if os.name == "posix":
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes of free memory to keep
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks are returned at once
