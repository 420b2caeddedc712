"""Set up torch, malloc and warnings for commands."""

import ctypes
import os
import warnings


def set_up_process():
    """Set defaults before torch is imported; environment variables set by the user take precedence."""
    # shorten OpenMP's busy waiting, which slowed training up to 15 times when other processes ran
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # reduce memory fragmentation on a GPU, except on WSL, where the first allocation may fail (pytorch issue 192330)
    in_wsl = hasattr(os, "uname") and "microsoft" in os.uname().release.lower()
    if not in_wsl and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # let malloc keep freed memory: saves 1 to 4 % of the time per step, because Linux zeroes new pages
    if os.name == "posix":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: keep up to 1 GiB of freed memory
            libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: freed blocks above 32 MiB go back to the system at once
    # hide a warning from Pillow: data/media.py raises an error if an image has too many pixels
    warnings.filterwarnings("ignore", "Image size .* exceeds limit .* decompression bomb")
