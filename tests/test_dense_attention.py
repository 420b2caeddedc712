"""Dense attention in each of its forms, against the formula."""

import pytest
import torch

from minivlmrl.kernels.dense_attention import dense_attention, flash_attention


@pytest.mark.parametrize(("L", "T"), [(5, 5), (5, 12), (1, 9), (40, 150)])
def test_causal_attention_sees_up_to_the_lower_right(L, T):
    """Each form against the formula in float64: written out, the fused kernel's (150 keys), flash attention's bias."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, L, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 3, T, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    sees = torch.tensor([[j <= T - L + i for j in range(T)] for i in range(L)])
    heads = torch.arange(6) // 2
    scores = (q @ k[:, heads].mT * 8**-0.5).masked_fill(~sees, float("-inf"))
    expected = scores.softmax(-1) @ v[:, heads]
    for attention in (lambda *qkv: dense_attention(*qkv, is_causal=True), flash_attention):
        torch.testing.assert_close(attention(q, k, v), expected, atol=1e-12, rtol=1e-12)
