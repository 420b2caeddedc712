"""Compare dense attention with its formula; test_attention.py and test_decoder.py test gathered rows."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from minivlmrl.kernels import dense_attention as dense
from tests.helpers.pretend_cuda import CUDA, PretendCuda


@pytest.mark.parametrize(("L", "T"), [(5, 5), (5, 12), (1, 9), (40, 150)])
def test_causal_attention_sees_up_to_the_lower_right(L, T):
    """Attention to 150 keys takes the fused kernel, and to fewer keys the step-by-step path."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, L, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 3, T, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    unseen = torch.ones(L, T).triu(T - L + 1) > 0
    heads = torch.arange(6) // 2
    expected = (q @ k[:, heads].mT * 8**-0.5).masked_fill(unseen, -torch.inf).softmax(-1) @ v[:, heads]
    torch.testing.assert_close(dense.dense_attention(q, k, v, is_causal=True), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0)])
def test_no_kernel_stores_scores_on_a_gpu(capability, monkeypatch):
    """Below compute capability 8.0, SDPA avoids storing scores only for float32, equal head counts and no mask."""
    calls = []

    def attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        calls.append((q.dtype, q.shape[1] == k.shape[1], attn_mask is None))
        return sdpa(q, k, v, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)

    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 8, generator=generator).bfloat16() for heads in (6, 3, 3))
    expected = dense.dense_attention(q.float(), k.float(), v.float(), is_causal=True)
    with PretendCuda(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(dense, "can_use_flash_attention", lambda parameters: capability >= (8, 0))
        out = dense.dense_attention(q.to(CUDA), k.to(CUDA), v.to(CUDA), is_causal=True)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.cpu().float(), expected, atol=2e-2, rtol=1e-2)
    assert calls == ([] if capability >= (8, 0) else [(torch.float32, True, True)])


def test_who_imports_per_token_logps_has_no_cudnn_attention():
    """Its gradients can be NaN with a mask, also where no run has set up the process."""
    look = "print(torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled())"
    code = f"import torch; from minivlmrl.model.logprobs import per_token_logps; {look}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False True\n"
