"""Run the kernel tests again in Triton's interpreter, in a separate process.

Triton reads TRITON_INTERPRET at its first import, and a process that interprets kernels cannot compile them. The child
process has MINIVLMRL_KERNELS=triton, so all public functions in kernels/ use their Triton kernel.

An interpreting process that imports this module also corrects two differences from a GPU. First, the interpreter stores
bfloat16 as uint16, truncates instead of rounding to nearest even, and multiplies bit patterns in tl.dot
(https://github.com/triton-lang/triton/issues/11584). Arithmetic on bfloat16 still raises an error, because our kernels
convert to float32 directly after a load. Second, for a number and NaN, tl.maximum and tl.minimum return the number on a
GPU by default, but NaN in the interpreter.
"""

import os
import subprocess
import sys

import numpy as np

from minivlmrl.kernels.backend import INTERPRETED, tl
from tests.helpers.links import ROOT


def run_interpreted(*modules: str) -> None:
    """Run test files in the interpreter, and show their output if a test fails."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "MINIVLMRL_KERNELS": "triton", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    command += [f"tests/kernels/test_{name}.py" for name in modules]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Convert float32 to bfloat16 bit patterns, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def mend_bfloat16() -> None:
    """Replace the interpreter's four methods for bfloat16."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import TensorHandle

    cast = Builder.cast_impl
    convert = Builder.create_fp_to_fp
    dot = Builder.create_dot
    binary = Builder.binary_op

    def wide(handle):
        if handle.dtype.scalar == tl.bfloat16:
            return TensorHandle(widen(handle.data), tl.float32)
        return handle

    def mended_cast(self, source, target):
        if tl.bfloat16 not in (source.dtype.scalar, target.scalar) or source.dtype.scalar == target.scalar:
            return cast(self, source, target)
        values = wide(source)
        if target.scalar == tl.bfloat16:
            return TensorHandle(narrow(values.data.astype(np.float32)), tl.bfloat16)
        return cast(self, values, target)

    def mended_convert(self, source, target, rounding):
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return mended_cast(self, source, target)
        return convert(self, source, target, rounding)

    def mended_dot(self, a, b, c, *rest):
        return dot(self, wide(a), wide(b), c, *rest)

    def mended_binary(self, left, right, operation):
        if left.dtype.scalar == tl.bfloat16:
            raise TypeError("a kernel computes with bfloat16 values; convert them with .to(tl.float32) after the load")
        return binary(self, left, right, operation)

    Builder.cast_impl, Builder.create_fp_to_fp = mended_cast, mended_convert
    Builder.create_dot, Builder.binary_op = mended_dot, mended_binary


def mend_nan() -> None:
    """Make maximum and minimum ignore NaN, like max.f32 on a GPU."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    Builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    Builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)


if INTERPRETED:
    mend_bfloat16()
    mend_nan()
