"""Reinforcement learning for vision-language models, written from scratch in PyTorch.

This file sets environment variables that torch reads when it is imported, or later. Values that the
user has set are kept.
"""

import os
import sys

# `python -m minivlmrl` searches modules in the working folder first, where a folder of unknown origin
# could have a yaml.py or a torch.py. So the working folder is removed from sys.path, and __main__.py
# inserts it again for commands that may run code of the user. In a clone that is not installed, the
# working folder is the clone itself. sys.argv[0] is "-m" while Python locates a module.
WORKING_FOLDER = None
if (
    sys.argv[:1] == ["-m"]
    and {"minivlmrl", "-mminivlmrl"} & {*sys.orig_argv}
    and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
):
    WORKING_FOLDER = sys.path.pop(0)

import ctypes  # noqa: E402

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
