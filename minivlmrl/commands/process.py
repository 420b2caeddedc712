"""Process settings for commands: torch, malloc and warnings."""

import ctypes
import os
import warnings


def set_up_process():
    """Set up torch, malloc and Pillow, before torch is imported; the user's environment variables win.

    For commands only: importing minivlmrl changes nothing.
    """
    # GNU OpenMP threads wait in a busy loop; at its default length, training was up to 15 times slower if other
    # processes used the same cores
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # expandable segments: less GPU memory fragmentation if step lengths vary; not on WSL, where the first
    # allocation may fail (pytorch issue 192330)
    in_wsl = hasattr(os, "uname") and "microsoft" in os.uname().release.lower()
    if not in_wsl and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    keep_freed_memory()
    # data/media.py refuses such images, and names the row
    warnings.filterwarnings("ignore", "Image size .* exceeds limit .* decompression bomb")


def keep_freed_memory():
    """Let malloc keep freed memory: Linux would zero it for the next use, 1 to 4 % per step."""
    if os.name != "posix":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: free bytes to keep
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks are returned at once
