"""Which implementation of a kernel runs, its torch path or its Triton path, and what kernel files need of Triton.

The torch path runs everywhere and is what the Triton path is tested against. Triton runs on a GPU, or on a CPU in its
interpreter, which executes a kernel with numpy, one program after the other: slow, and exact enough for tests.

    MINIVLMRL_KERNELS=auto      (or unset) Triton for float32, float16 and bfloat16 tensors on a GPU, torch for all else
    MINIVLMRL_KERNELS=torch     the torch path everywhere
    MINIVLMRL_KERNELS=triton    Triton, or an error that says why it cannot run
"""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Kernel files say `from minivlmrl.kernels.backend import tl, triton`. Where Triton is not installed (macOS, Windows)
# the two names that are read while a file is imported have stand-ins, and kernels stay functions that nobody calls.
try:
    import triton
    import triton.language as tl
except ImportError:
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=lambda value: value)

INSTALLED = hasattr(tl, "program_id")
# Triton decides when it is first imported: a TRITON_INTERPRET=1 set later in the process has no effect
INTERPRETED = INSTALLED and not isinstance(tl.sum, triton.JITFunction)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what kernels read; they compute in float32
CAPABILITY = (8, 0)  # the oldest NVIDIA generation with bfloat16 (A100); the figures of AMD's are larger


@dataclass(frozen=True)
class Build:
    """A kernel at one real size, as `python -m minivlmrl kernels` compiles it: each kernel file lists its own.

    Args:
        name: what the table and the budgets call it, unique.
        kernel: the @triton.jit function.
        signature: parameter -> Triton type ("*bf16", "*i64", "i32", "fp32"), for all that are not constexprs.
        constexprs: parameter -> value; None for a pointer that this build does without.
        num_warps, num_stages: as the launch passes them.
        elements: what one turn of the loop handles (logits): with it, instructions are counted for each element.
        unaligned: parameters that nothing says are divisible by 16; all other pointers and i32 are taken to be.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    elements: int | None = None
    unaligned: tuple[str, ...] = field(default=())


def backend_for(tensor: Tensor) -> str:
    """Choose the implementation for a tensor, by its device and dtype and by MINIVLMRL_KERNELS.

    Returns:
        "torch" or "triton".
    Raises:
        ValueError: MINIVLMRL_KERNELS is none of auto, torch, triton, or asks for what cannot run here.
    """
    wish = os.environ.get("MINIVLMRL_KERNELS", "auto")
    if wish not in ("auto", "torch", "triton"):
        raise ValueError(f"MINIVLMRL_KERNELS={wish}: write auto, torch or triton")
    if wish == "torch" or (wish == "auto" and tensor.device.type != "cuda"):
        return "torch"
    obstacle = _obstacle(tensor.device, tensor.dtype)
    if wish == "triton" and obstacle:
        raise ValueError(f"MINIVLMRL_KERNELS=triton: {obstacle}")
    return "torch" if obstacle else "triton"


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton cannot run for such tensors, None if it can. ROCm's devices are called cuda too."""
    if not INSTALLED:
        return "Triton is not installed: pip install triton"
    if dtype not in DTYPES:
        return f"the kernels compute in float32, the tensor is {dtype}: convert it, or use MINIVLMRL_KERNELS=auto"
    if device.type == "cpu" and not INTERPRETED:
        return "on a CPU it needs Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
    if device.type not in ("cuda", "cpu"):
        return f"it does not run on {device.type} devices: use MINIVLMRL_KERNELS=auto"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0: use MINIVLMRL_KERNELS=auto"
    return None
