"""Dense attention in each of its forms, against the formula."""

import pytest
import torch

from minivlmrl.kernels.dense_attention import Reorder, dense_attention, gather_rows


@pytest.mark.parametrize(("L", "T"), [(5, 5), (5, 12), (1, 9), (40, 150)])
def test_causal_attention_sees_up_to_the_lower_right(L, T):
    """Each form against the formula in float64: written out, the fused kernel's (150 keys)."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, L, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 3, T, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    unseen = torch.ones(L, T).triu(T - L + 1) > 0
    heads = torch.arange(6) // 2
    scores = (q @ k[:, heads].mT * 8**-0.5).masked_fill(unseen, -torch.inf)
    expected = scores.softmax(-1) @ v[:, heads]
    torch.testing.assert_close(dense_attention(q, k, v, is_causal=True), expected, atol=1e-12, rtol=1e-12)


def test_gather_rows_is_indexing():
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[4, 0], [4, 2]])
    assert torch.equal(gather_rows(x, index), x[index])
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, index), (x,))


@pytest.mark.parametrize("back", [None, torch.tensor([2, 0, 1])], ids=["zeros", "a gather"])
def test_rows_in_another_order_and_their_gradient(back):
    """Of three rows two, or all three and one that fills up."""
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([2, 0] if back is None else [1, 2, 0, 0])
    assert torch.equal(Reorder.apply(x, index, back), x[index])
    assert torch.autograd.gradcheck(lambda x: Reorder.apply(x, index, back)[:3], (x,))
