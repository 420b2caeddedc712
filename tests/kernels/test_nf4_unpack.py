"""Compare 4-bit weights unpacked by the kernel and by torch bit by bit; test_backend.py interprets the kernel."""

import pytest
import torch

from minivlmrl.kernels.backend import INTERPRETED
from minivlmrl.model.nf4 import pack_nf4, unpack_nf4
from tests.helpers import interpreter  # noqa: F401 (repairs bfloat16)


@pytest.mark.skipif(not INTERPRETED, reason="calls a kernel: `pytest -m slow` runs it interpreted")
@pytest.mark.parametrize(("shape", "dtype"), [
    ((1, 3), torch.bfloat16), ((64, 96), torch.float32), ((130, 70), torch.float16), ((300, 512), torch.bfloat16),
], ids=str)  # fmt: skip
def test_the_kernel_has_the_bits_of_torch(shape, dtype, monkeypatch):
    """The shapes include padded blocks, partly filled programs and more than 256 scales."""
    packed = pack_nf4(0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    found = unpack_nf4(**packed, dtype=dtype)
    monkeypatch.setenv("MINIVLMRL_KERNELS", "torch")
    assert found.dtype == dtype and torch.equal(found, unpack_nf4(**packed, dtype=dtype))
