"""Select the device of a rank."""

import os
import re

import torch

from minivlmrl.errors import UserError

GB = 10**9


def find_device(local_rank: int = 0) -> torch.device:
    """Return a rank's GPU, or the CPU if there is no GPU."""
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise UserError(
                f"local rank {local_rank} has no GPU, because the number of visible GPUs is {num_gpus}. Start at most "
                "that many processes (--nproc_per_node), or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
            )
        return torch.device("cuda", local_rank)
    if torch.backends.cuda.is_built() and not hides_gpus():
        try:
            torch.cuda.init()
        except RuntimeError as error:
            # these PyTorch errors mean that the machine has no GPU
            if not re.search("no NVIDIA driver|No CUDA GPUs|in forked subprocess", str(error)):
                raise UserError(
                    f"CUDA cannot use this machine's GPU ({str(error).splitlines()[0]}): update the driver, install a "
                    "PyTorch build for it (docs/memory.md), or train on the CPU with CUDA_VISIBLE_DEVICES=-1"
                ) from error
    return torch.device("cpu")


def hides_gpus() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
