"""Choose the torch path or the Triton path of a kernel, and import Triton where it is installed.

The torch path runs everywhere, and the Triton path is tested against it. Triton runs on a GPU, or
on a CPU in its interpreter, with numpy, one program after the other: slow, but enough for tests.

    MINIVLMRL_KERNELS=auto      (or unset) Triton for float32, float16 and bfloat16 tensors on a GPU, otherwise torch
    MINIVLMRL_KERNELS=torch     the torch path everywhere
    MINIVLMRL_KERNELS=triton    Triton, or an error that says why it cannot run
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

# Kernel files import tl and triton from here. Where Triton is not installed (macOS, Windows), or
# would only take 70 MiB (no GPU, nothing has imported it or asks for it), what is read while a file
# is imported has substitutes, and the kernels are functions that are never called.
triton = SimpleNamespace(jit=lambda kernel: kernel)
tl = SimpleNamespace(constexpr=lambda value: value)
INSTALLED = find_spec("triton") is not None
REQUESTED = "triton" in sys.modules or os.environ.keys() & {"TRITON_INTERPRET", "MINIVLMRL_KERNELS"}
if INSTALLED and (REQUESTED or torch.cuda.is_available()):
    triton = import_module("triton")
    tl = import_module("triton.language")

# Triton decides when it is first imported: setting TRITON_INTERPRET=1 later has no effect
INTERPRETED = hasattr(tl, "sum") and not isinstance(tl.sum, triton.JITFunction)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of tensors; kernels compute in float32
CAPABILITY = (8, 0)  # of the oldest NVIDIA card with bfloat16 (A100); AMD's numbers are larger


def backend_for(tensor: Tensor) -> Literal["torch", "triton"]:
    """Choose by device and dtype and by MINIVLMRL_KERNELS (ValueError: unknown; cannot run)."""
    choice = os.environ.get("MINIVLMRL_KERNELS", "auto")
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"MINIVLMRL_KERNELS={choice}: write auto, torch or triton")
    if choice == "torch" or (choice == "auto" and tensor.device.type != "cuda"):
        return "torch"
    obstacle = _obstacle(tensor.device, tensor.dtype)
    if choice == "triton" and obstacle:
        raise ValueError(f"MINIVLMRL_KERNELS=triton: {obstacle}")
    if obstacle and tensor.dtype in DTYPES:
        _warn(obstacle)
    return "torch" if obstacle else "triton"


@cache
def _warn(obstacle: str) -> None:
    warnings.warn(f"kernels run in torch, slower: {obstacle}", stacklevel=3)


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton cannot run for such tensors, or None. ROCm devices are called cuda too."""
    if not INSTALLED:
        return "Triton is not installed: pip install triton"
    if dtype not in DTYPES:
        return f"the kernels compute in float32, not {dtype}: use MINIVLMRL_KERNELS=auto"
    if device.type == "cpu" and INTERPRETED:
        return None
    if device.type != "cuda":
        return "without a GPU it needs a CPU and TRITON_INTERPRET=1, set before Python starts"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} is older than compute capability 8.0: use MINIVLMRL_KERNELS=auto"
    return _compiler_obstacle()


@cache
def _compiler_obstacle() -> str | None:
    """Why Triton cannot compile, if so: its driver needs a C compiler and Python's headers."""
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # whatever it is, the kernels would meet it too
        cause = " ".join(str(error).split())
        return f"Triton cannot compile here ({cause:.200}): it needs gcc and python3-dev"
    return None


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the host, to a card from pinned memory: the host does not wait."""
    if torch.device(device).type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
