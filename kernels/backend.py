"""Choose between a kernel's PyTorch and Triton code, and import Triton if possible.

PyTorch code runs on every device, and tests compare Triton code with it. Triton runs on a GPU, or on a CPU in its slow
interpreter. The environment variable MINIVLMRL_KERNELS selects the code:

    auto (default): use Triton for float32, float16 and bfloat16 tensors on a GPU, PyTorch for other tensors.
    torch: always use PyTorch.
    triton: use Triton for float32, float16 and bfloat16 tensors, or raise an error if Triton cannot run.

Before a kernel's first use on a GPU, self_test.py compares it with float64 results. If the kernel fails, or has a
relative error above 2 %, PyTorch code is used with a warning; with MINIVLMRL_KERNELS=triton, an error is raised.
MINIVLMRL_SELF_TEST=0 disables the check.
"""

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

# Kernel files import tl and triton from here; without Triton, both are placeholders. Importing Triton takes 70
# MiB, so import it only if there is a GPU, for its interpreter, or if other code has imported it.
triton = SimpleNamespace(jit=lambda kernel: kernel)
tl = SimpleNamespace(constexpr=lambda value: value)
INSTALLED = find_spec("triton") is not None
if INSTALLED and ("triton" in sys.modules or "TRITON_INTERPRET" in os.environ or torch.cuda.is_available()):
    triton = import_module("triton")
    tl = import_module("triton.language")

# True in Triton's interpreter, even if TRITON_INTERPRET has changed since the import
INTERPRETED = hasattr(tl, "sum") and not isinstance(tl.sum, triton.JITFunction)
# input dtypes of the Triton kernels, which sum in float32
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

KERNELS = ("window_attention", "decode_attention", "selective_log_softmax", "linear_log_softmax", "nf4_unpack")
rejections: dict[tuple[torch.device, str], str | None] = {}  # error in a kernel's self-test, None = correct


def backend_for(tensor: Tensor, kernel: str) -> Literal["torch", "triton"]:
    """Choose a kernel's backend from MINIVLMRL_KERNELS and a tensor's device and dtype.

    Raises:
        ValueError: MINIVLMRL_KERNELS is unknown, or "triton" although the kernel cannot run.
    """
    choice = os.environ.get("MINIVLMRL_KERNELS", "auto")
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"MINIVLMRL_KERNELS is {choice!r}, but it must be auto, torch or triton")
    if choice == "torch" or (choice == "auto" and tensor.device.type != "cuda") or tensor.dtype not in DTYPES:
        return "torch"
    device = tensor.device
    obstacle = None
    if not INSTALLED:
        obstacle = "Triton is not installed; run pip install triton (triton-windows on Windows)"
    elif device.type == "cuda":  # ROCm devices also have type "cuda"
        obstacle = _compiler_obstacle()
        if is_before_ampere(device):
            obstacle = f"the GPU {torch.cuda.get_device_name(device)} has a compute capability below 8.0"
        elif not obstacle and os.environ.get("MINIVLMRL_SELF_TEST") != "0":
            obstacle = _rejection(device, kernel)
    elif device.type != "cpu" or not INTERPRETED:
        obstacle = (
            f"the tensor is on the device {device}, which is not a GPU; to run Triton's interpreter on a CPU, set "
            "TRITON_INTERPRET=1 before Python starts"
        )
    if not obstacle:
        return "triton"
    if choice == "triton":
        raise ValueError(
            f"MINIVLMRL_KERNELS is triton, but {obstacle}; or set MINIVLMRL_KERNELS=auto, which "
            "uses torch where Triton cannot run"
        )
    _warn(f"PyTorch replaces a Triton kernel and is slower, because {obstacle}")
    return "torch"


def _rejection(device: torch.device, kernel: str) -> str | None:
    """Check a kernel before its first use on a GPU; return why it is rejected, None if it is correct."""
    if (device, kernel) not in rejections:
        rejections[device, kernel] = None  # accepted for now, because the check runs the kernel
        rejections[device, kernel] = _check(device, kernel)
    return rejections[device, kernel]


def _check(device: torch.device, kernel: str) -> str | None:
    # import by name, because self_test imports the kernels, and the kernels import this file
    self_test = import_module("minivlmrl.kernels.self_test")
    try:
        # in a new thread, because gradient mode and activation checkpointing hooks are thread-local
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(self_test.largest_error, kernel, str(device)).result()
    except Exception as failure:  # compilers may raise any error
        cause = str(failure).partition("\n")[0]  # first line only, because CUDA adds three lines of advice
        reason = f"failed its self-test ({type(failure).__name__}: {cause})"
    else:
        if error <= self_test.TOLERANCE:  # False for NaN
            return None
        reason = f"has a relative error of {error:.1%}"
    return (
        f"{kernel} {reason} on the GPU {torch.cuda.get_device_name(device)}. `python -m minivlmrl.kernels.self_test` "
        "repeats the check; another version of Triton may compile the kernel correctly"
    )


@cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def is_before_ampere(device: torch.device) -> bool:
    """Return True for NVIDIA GPUs before the A100: compute capability below 8.0, no bfloat16."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0)


@cache
def _compiler_obstacle() -> str | None:
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # Triton compiles C code here, which may raise any exception
        cause = " ".join(str(error).split())
        return f"Triton cannot compile a kernel ({cause:.200}); install gcc and python3-dev"
    return None


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device. Copies to a GPU use pinned memory, so that the CPU does not wait."""
    is_upload = torch.device(device).type == "cuda" and not x.is_cuda
    if is_upload:
        try:
            x = x.pin_memory()
        except RuntimeError as error:
            _warn(f"copies to the GPU are slower, because the host could not pin memory ({error!s:.200})")
    return x.to(device, non_blocking=is_upload)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def is_half_on_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True for a 16-bit dtype on a GPU, or on the meta device, which stands for a GPU in memory estimates."""
    return device.type in ("cuda", "meta") and dtype in (torch.float16, torch.bfloat16)
