"""Dense attention in each of its forms, against the formula."""

import pytest
import torch
from pretend_cuda import CUDA, PretendCuda

from minivlmrl.kernels.dense_attention import dense_attention


@pytest.mark.parametrize(("L", "T"), [(5, 5), (5, 12), (1, 9), (40, 150)])
def test_causal_attention_sees_up_to_the_lower_right(L, T):
    """Each form against the formula in float64: written out, the fused kernel's (150 keys), a card's."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, L, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 3, T, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    sees = torch.tensor([[j <= T - L + i for j in range(T)] for i in range(L)])
    heads = torch.arange(6) // 2
    scores = (q @ k[:, heads].mT * 8**-0.5).masked_fill(~sees, float("-inf"))
    expected = scores.softmax(-1) @ v[:, heads]
    torch.testing.assert_close(dense_attention(q, k, v, is_causal=True), expected, atol=1e-12, rtol=1e-12)
    with PretendCuda() as gpu:  # the flash kernel takes 16 bits alone
        card = dense_attention(*(x.to(CUDA, torch.bfloat16) for x in (q, k, v)), is_causal=True)
        assert gpu.launches.total() == 4  # three copies and one kernel, no mask
        torch.testing.assert_close(card.cpu().double(), expected, atol=0.03, rtol=0.03)
