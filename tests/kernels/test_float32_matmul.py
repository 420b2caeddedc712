"""Test products of bfloat16 matrices with float32 results. Without a GPU, only the calls of PyTorch are tested."""

import pytest
import torch

from minivlmrl.kernels.float32_matmul import float32_matmul, has_float32_products
from tests.helpers.pretend_cuda import CUDA, PretendCuda


@pytest.mark.parametrize("shape", [(), (2, 3)], ids=["matrices", "batches"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_result_is_not_rounded_to_the_dtype_of_its_factors(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    a = (torch.randn(*shape, 5, 16, generator=generator) + 4).to(dtype)
    b = (torch.randn(*shape, 7, 16, generator=generator) + 4).to(dtype).mT
    found = float32_matmul(a, b)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), atol=0, rtol=1e-6)


@pytest.mark.parametrize("given", [False, True], ids=["new memory", "given memory"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wide_factor_is_converted_in_pieces(monkeypatch, given, dtype):
    monkeypatch.setattr("minivlmrl.kernels.float32_matmul.COLUMNS", 3)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 16, generator=generator).bfloat16()
    b = torch.randn(7, 16, generator=generator).to(dtype).T
    out = torch.full((5, 7), torch.nan) if given else None
    found = float32_matmul(a, b, out)
    assert out is None or found.data_ptr() == out.data_ptr()
    torch.testing.assert_close(found.double(), a.double() @ b.double(), atol=1e-5, rtol=1e-6)


def refuses(*arguments, out_dtype, **options):
    raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx\nadvice")


def wrong(a, b, out_dtype, out=None):
    return torch.zeros(len(a), b.shape[1], dtype=out_dtype, device=a.device)


@pytest.mark.parametrize("product", [refuses, wrong, None])
def test_a_gpu_without_such_products_gets_float32_copies(product, monkeypatch):
    """Nobody has run a T4, so the first product tries what its cuBLAS supports."""
    has_float32_products.cache_clear()
    a, b = torch.randn(5, 16).bfloat16(), torch.randn(16, 7).bfloat16()
    with PretendCuda():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        monkeypatch.setattr(torch, "mm", product or torch.mm)
        assert has_float32_products(CUDA) == (product is None)
        found = float32_matmul(a.to(CUDA), b.to(CUDA)).cpu()
    has_float32_products.cache_clear()
    torch.testing.assert_close(found, a.float() @ b.float())
