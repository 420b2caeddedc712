"""Choose between a kernel's PyTorch and Triton code, and import Triton if possible.

PyTorch code runs on every device, and tests compare Triton code with it. Triton runs on a GPU, or on a CPU in its
interpreter, which executes programs one by one with numpy. The environment variable MINIVLMRL_KERNELS selects:

    auto      (default) Triton for float32, float16 and bfloat16 tensors on a GPU, else torch
    torch     always torch
    triton    always Triton; if it cannot run, raise an error with the reason

Before the first use of Triton on a GPU, verdicts.py compares all kernels with float64, which takes about 10 s, and
stores the errors on disk. If a check fails, or the relative error is above 2 %, PyTorch replaces the kernel, with a
warning; with MINIVLMRL_KERNELS=triton, an error is raised instead. MINIVLMRL_SELF_TEST can disable the check:

    1         (default) check once per GPU model, driver, version and source code
    0         use all kernels without a check
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

# Kernel files import tl and triton from backend.py; both are placeholders without Triton. Importing Triton takes
# 70 MiB, so it is imported only with a GPU, if an environment variable requests it, or if other code has imported it.
triton = SimpleNamespace(jit=lambda kernel: kernel)
tl = SimpleNamespace(constexpr=lambda value: value)
INSTALLED = find_spec("triton") is not None
REQUESTED = "triton" in sys.modules or os.environ.keys() & {"TRITON_INTERPRET", "MINIVLMRL_KERNELS"}
if INSTALLED and (REQUESTED or torch.cuda.is_available()):
    triton = import_module("triton")
    tl = import_module("triton.language")

# True in Triton's interpreter, even if TRITON_INTERPRET has changed since Triton was imported
INTERPRETED = hasattr(tl, "sum") and not isinstance(tl.sum, triton.JITFunction)
# input dtypes of the Triton kernels, which sum in float32
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

KERNELS = ("window_attention", "decode_attention", "selective_log_softmax", "linear_log_softmax", "nf4_unpack")


def backend_for(tensor: Tensor, kernel: str) -> Literal["torch", "triton"]:
    """Choose a kernel's backend from MINIVLMRL_KERNELS and a tensor's device and dtype.

    Args:
        kernel: key in KERNELS.
    Raises:
        ValueError: an environment variable has an unknown value, or MINIVLMRL_KERNELS is "triton" and the kernel cannot
        run.
    """
    choice = _setting("MINIVLMRL_KERNELS", "auto", "torch", "triton")
    if choice == "torch" or (choice == "auto" and tensor.device.type != "cuda"):
        return "torch"
    obstacle = _obstacle(tensor.device, tensor.dtype) or _rejection(tensor.device, kernel)
    if obstacle is None:
        return "triton"
    if choice == "triton":
        raise ValueError(
            f"MINIVLMRL_KERNELS is triton, but {obstacle}; or set MINIVLMRL_KERNELS=auto, which "
            "uses torch where Triton cannot run"
        )
    if tensor.dtype in DTYPES:
        _warn(f"PyTorch replaces a Triton kernel and is slower, because {obstacle}")
    return "torch"


def _setting(name: str, *values: str) -> str:
    value = os.environ.get(name, values[0])
    if value not in values:
        raise ValueError(
            f"the environment variable {name} is {value!r}, but it must be {', '.join(values[:-1])} or {values[-1]}"
        )
    return value


def _rejection(device: torch.device, kernel: str) -> str | None:
    """Return why a kernel failed its check on a GPU, None if it passed."""
    if _setting("MINIVLMRL_SELF_TEST", "1", "0") == "0" or device.type != "cuda":
        return None
    from minivlmrl.kernels.verdicts import rejected_kernels  # lazy import: only a GPU needs verdicts

    try:
        reason = rejected_kernels(device.index, KERNELS).get(kernel)
    except OSError as error:
        return f"Triton's cache folder cannot be used ({error}); set TRITON_CACHE_DIR to a folder on a local disk"
    return reason and (
        f"{kernel} {reason}. `python -m minivlmrl.kernels.self_test` repeats the check; another "
        "version of Triton may compile the kernel correctly"
    )


@cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton cannot run on a device with a dtype, None if it can."""
    if not INSTALLED:
        package = "triton-windows" if sys.platform == "win32" else "triton"
        return f"Triton is not installed; run pip install {package}"
    if dtype not in DTYPES:
        return f"the tensor has the dtype {dtype}, but the kernels support only float32, float16 and bfloat16"
    if device.type == "cpu" and INTERPRETED:
        return None
    if device.type != "cuda":  # ROCm devices also have type "cuda"
        return (
            f"the tensor is on the device {device}, which is not a GPU; to run Triton's "
            "interpreter on a CPU, set TRITON_INTERPRET=1 before Python starts"
        )
    if is_before_ampere(device):
        name = torch.cuda.get_device_name(device)
        return f"the GPU {name} has a compute capability below 8.0"
    return _compiler_obstacle()


def is_before_ampere(device: torch.device) -> bool:
    """Return True for NVIDIA GPUs before the A100: compute capability below 8.0, no bfloat16."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0)


@cache
def _compiler_obstacle() -> str | None:
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # any error, because a kernel launch would raise the same error
        cause = " ".join(str(error).split())
        return f"Triton cannot compile a kernel ({cause:.200}); install gcc and python3-dev"
    return None


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; for a GPU, through pinned memory, so that the CPU does not wait."""
    is_upload = torch.device(device).type == "cuda" and not x.is_cuda
    if is_upload:
        try:
            x = x.pin_memory()
        except RuntimeError as error:
            _warn(f"copies to the GPU are slower, because the host could not pin memory ({error!s:.200})")
    return x.to(device, non_blocking=is_upload)


def is_half_on_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True for 16-bit dtypes on a GPU, or on the meta device, which stands for a GPU in memory estimates."""
    return device.type in ("cuda", "meta") and dtype in (torch.float16, torch.bfloat16)
