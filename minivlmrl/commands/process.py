"""Settings for torch, malloc and warnings in a process that runs a command."""

import ctypes
import os
import warnings


def set_up_process():
    """Set up torch, malloc and Pillow, but keep the user's environment variables; call this before importing torch.

    Only commands change their process. Importing minivlmrl as a library changes nothing.
    """
    # GNU OpenMP threads wait in a busy loop. With the default length of the loop, training was up to fifteen times
    # slower when other processes used the same cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # PyTorch's expandable segments avoid fragmentation of GPU memory if steps have different lengths. On WSL, the first
    # allocation with expandable segments could fail (pytorch issue 192330).
    in_wsl = hasattr(os, "uname") and "microsoft" in os.uname().release.lower()
    if not in_wsl and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    keep_freed_memory()
    # Pillow's warning is not needed: data/media.py refuses such images with a message that names the row.
    warnings.filterwarnings("ignore", "Image size .* exceeds limit .* decompression bomb")


def keep_freed_memory():
    """Let malloc keep freed memory.

    By default, Linux takes freed memory back and zeros it for the next use, which takes 1 to 4 % of a step's time.
    """
    if os.name != "posix":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes of free memory to keep
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks are returned at once
