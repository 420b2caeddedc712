"""Reinforcement learning for vision-language models, written from scratch in PyTorch.

This file sets environment variables that torch reads when it is imported, or later. Values that the
user has set are kept.
"""

import ctypes
import os

# GNU OpenMP threads spin while they wait. With the default spin count, runs took up to fifteen times
# as long when other processes used the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# GPU memory segments can grow, so that rollouts and steps of different lengths do not fragment it
if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
# Keep free memory in the process. glibc would return it to the kernel, which clears it page by page
# for the next step; that took 1 to 4 % of a step.
if os.name == "posix":
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes that may stay free
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: only larger blocks are returned at once
