"""Compare all dense attention forms with the formula; test_attention.py and test_decoder.py test gathered rows."""

import pytest
import torch

from minivlmrl.kernels.dense_attention import dense_attention


@pytest.mark.parametrize(("L", "T"), [(5, 5), (5, 12), (1, 9), (40, 150)])
def test_causal_attention_sees_up_to_the_lower_right(L, T):
    """Compare both paths with the formula in float64: the step-by-step path, and the fused kernel (150 keys)."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, L, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 3, T, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    unseen = torch.ones(L, T).triu(T - L + 1) > 0
    heads = torch.arange(6) // 2
    scores = (q @ k[:, heads].mT * 8**-0.5).masked_fill(unseen, -torch.inf)
    expected = scores.softmax(-1) @ v[:, heads]
    torch.testing.assert_close(dense_attention(q, k, v, is_causal=True), expected, atol=1e-12, rtol=1e-12)
