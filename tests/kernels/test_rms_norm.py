"""Compare the forward and backward pass of RMSNorm with torch's RMSNorm."""

import pytest
import torch

from minivlmrl.kernels.rms_norm import RMSNorm


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_it_equals_torch(shape, dtype, tolerance):
    norm = RMSNorm(8, eps=1e-3).to(dtype)
    norm.weight.data.normal_()
    x, g = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)
    actual = norm(x)
    assert actual.dtype == dtype
    expected = torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-3)
    pairs = [(actual, expected)]
    pairs += zip(*(torch.autograd.grad(y, (x, norm.weight), g) for y in (actual, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
