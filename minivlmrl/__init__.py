"""Reinforcement learning for vision-language models, from scratch: files -> tokens ->
log-probabilities -> steps.

What is set here is read when torch is imported, or later; a user's own value stays.
"""

import ctypes
import os

# A waiting thread of GNU OpenMP spins before it sleeps, by default so long that runs took up to
# fifteen times as long when other work kept the cores busy.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# a card's memory grows in place: rollouts and steps of all lengths leave no holes in it
if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
# glibc gives free memory back to the kernel, which has to clear it for the next step, page by page:
# that took 1 to 4 % of a step.
if os.name == "posix":
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes that may lie free
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks alone are given back at once
