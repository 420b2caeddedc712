"""Select the device of a rank, and describe the device for the user."""

import os
import re
import shutil

import torch

GB = 10**9


def find_device(local_rank: int = 0) -> torch.device:
    """Return the GPU of a rank, or the CPU if the machine has no GPU."""
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ValueError(
                f"local rank {local_rank} has no GPU, because the number of visible GPUs is {num_gpus}. Start at most "
                "that many processes (--nproc_per_node), or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
            )
        return torch.device("cuda", local_rank)
    if torch.backends.cuda.is_built() and not hides_gpus():
        try:
            torch.cuda.init()
        except RuntimeError as error:
            # the regular expression matches PyTorch's errors on a machine without a GPU
            if not re.search("no NVIDIA driver|No CUDA GPUs|in forked subprocess", str(error)):
                raise ValueError(
                    f"CUDA cannot use this machine's GPU ({str(error).splitlines()[0]}): update the driver, install a "
                    "PyTorch build for it (docs/memory.md), or train on the CPU with CUDA_VISIBLE_DEVICES=-1"
                ) from error
    return torch.device("cpu")


def hides_gpus() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def describe_device(device: torch.device) -> str:
    """Describe the device: the number of CPU threads, or the GPU's name, compute capability, driver and free memory."""
    if device.type != "cuda":
        # a machine with the program nvidia-smi has an NVIDIA driver, including on Windows and in WSL
        unused = not torch.backends.cuda.is_built() and not hides_gpus() and shutil.which("nvidia-smi")
        note = ", because this PyTorch is built for CPUs only: see docs/memory.md" if unused else ""
        return f"CPU (threads: {torch.get_num_threads()}){note}"
    from minivlmrl.kernels.verdicts import driver_version  # imported here, because only a GPU has a driver

    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    # driver_version() is a text such as "NVRM version: NVIDIA UNIX x86_64 Kernel Module 580.65"
    number = re.search(r"\b\d+(\.\d+)+\b", driver_version())
    driver = number.group() if number else "unknown"
    return (
        f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}, driver {driver}, "
        f"{free / GB:.1f} of {total / GB:.1f} GB free)"
    )
