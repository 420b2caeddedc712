"""Attention inside segments against one masked attention over everything."""

import pytest
import torch

from minivlmrl.kernels.window_attention import Segments, gather_rows, window_attention


@pytest.mark.parametrize("lengths", [[4, 4, 4], [16, 4, 16, 8, 1, 4], [7]], ids=str)
def test_equals_a_block_diagonal_mask(lengths):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), 3, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)
    )
    block = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
    scores = torch.einsum("ihd,jhd->hij", q, k) * 8**-0.5
    expected = torch.einsum("hij,jhd->ihd", scores.masked_fill(~block, float("-inf")).softmax(-1), v)
    actual = window_attention(q, k, v, Segments(lengths))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    upstream = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((actual * upstream).sum(), (q, k, v)),
        torch.autograd.grad((expected * upstream).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_gather_rows_is_indexing():
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[4, 0], [4, 2]])
    assert torch.equal(gather_rows(x, index), x[index])
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, index), (x,))
