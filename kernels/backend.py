"""Choose between the torch path and the Triton path of a kernel, and import Triton if possible.

The torch path runs everywhere; the Triton path is tested against it. Triton runs on a GPU, or on a
CPU in its interpreter, which executes one program after the other with numpy. The interpreter is
slow, but fast enough for tests. The environment variable MINIVLMRL_KERNELS selects the path:

    auto      (default) Triton for float32, float16 and bfloat16 tensors on a GPU, otherwise torch
    torch     the torch path everywhere
    triton    Triton, or an error that explains why Triton cannot run
"""

import os
import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

# Kernel files import tl and triton from here. These substitutes let the files be imported without
# Triton; the decorated kernels are then plain functions that are never called. Triton is not
# imported if it is not installed (macOS, Windows), or if it is not needed and would only take
# 70 MiB of memory (no GPU, no earlier import of triton, and no environment variable for it).
triton = SimpleNamespace(jit=lambda kernel: kernel)
tl = SimpleNamespace(constexpr=lambda value: value)
INSTALLED = find_spec("triton") is not None
REQUESTED = "triton" in sys.modules or os.environ.keys() & {"TRITON_INTERPRET", "MINIVLMRL_KERNELS"}
if INSTALLED and (REQUESTED or torch.cuda.is_available()):
    triton = import_module("triton")
    tl = import_module("triton.language")

# True if Triton runs in its interpreter. Triton reads TRITON_INTERPRET when it is imported, so that
# setting the variable later has no effect.
INTERPRETED = hasattr(tl, "sum") and not isinstance(tl.sum, triton.JITFunction)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of inputs; sums are float32
# oldest supported compute capability: the first NVIDIA GPU with bfloat16 (A100); all numbers of AMD
# GPUs are larger
CAPABILITY = (8, 0)


def backend_for(tensor: Tensor) -> Literal["torch", "triton"]:
    """Choose the backend for a tensor from its device, its dtype and MINIVLMRL_KERNELS.

    Raises:
        ValueError: MINIVLMRL_KERNELS has an unknown value, or it is triton and Triton cannot run.
    """
    choice = os.environ.get("MINIVLMRL_KERNELS", "auto")
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"MINIVLMRL_KERNELS is {choice!r}, it must be auto, torch or triton")
    if choice == "torch" or (choice == "auto" and tensor.device.type != "cuda"):
        return "torch"
    obstacle = _obstacle(tensor.device, tensor.dtype)
    if choice == "triton" and obstacle:
        raise ValueError(f"MINIVLMRL_KERNELS is triton, but Triton cannot run: {obstacle}")
    if obstacle and tensor.dtype in DTYPES:
        _warn(obstacle)
    return "torch" if obstacle else "triton"


@cache
def _warn(obstacle: str) -> None:
    warnings.warn(
        f"Kernels run in torch, which is slower, because Triton cannot run: {obstacle}",
        stacklevel=3,
    )


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton cannot run for tensors of this device and dtype; None if it can.

    ROCm devices have the type cuda, too.
    """
    if not INSTALLED:
        return "it is not installed; run pip install triton"
    if dtype not in DTYPES:
        return f"the kernels compute in float32 and not in {dtype}; set MINIVLMRL_KERNELS=auto"
    if device.type == "cpu" and INTERPRETED:
        return None
    if device.type != "cuda":
        return "the tensor is not on a GPU; on a CPU, set TRITON_INTERPRET=1 before Python starts"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} is older than compute capability 8.0; set MINIVLMRL_KERNELS=auto"
    return _compiler_obstacle()


@cache
def _compiler_obstacle() -> str | None:
    """Return why Triton cannot compile, or None; it needs a C compiler and Python's headers."""
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # any error, because launching a kernel would raise it too
        cause = " ".join(str(error).split())
        return f"it cannot compile here ({cause:.200}); install gcc and python3-dev"
    return None


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; to a GPU from pinned memory, so that the host does not wait."""
    if torch.device(device).type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
