"""Compare the decode attention kernel with its formula; test_backend.py runs this file in the interpreter."""

import pytest
import torch

from minivlmrl.kernels import decode_attention as module
from tests.helpers.interpreter import INTERPRETED

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-3}  # relative to the norm of the float64 result
DEVICE = "cpu" if INTERPRETED else "cuda"
runs = (lambda test: test) if INTERPRETED else pytest.mark.gpu  # a compiled kernel needs a GPU
CASES = [  # query heads, key heads, head_dim; prompt lengths, rows per prompt; key slots of a row, used key slots
    (16, 2, 128, [70, 33, 1], 2, 40, 17), (28, 4, 128, [40, 37], 3, 33, 33),  # Qwen2.5-VL 3B and 7B
    (16, 2, 128, [33], 9, 5, 1), (8, 2, 256, [20, 35], 2, 70, 40),  # two query tiles; head_dim of Qwen3.5
    (4, 4, 16, [3, 0, 64], 1, 32, 3), (4, 2, 64, [0, 0], 3, 9, 9),  # empty prompts
]  # fmt: skip


def numbers(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@runs
@pytest.mark.parametrize(
    ("dtype", "programs"), [(torch.float32, 1), (torch.bfloat16, 256), (torch.bfloat16, 1)], ids=str
)
@pytest.mark.parametrize(("H", "K", "D", "prompts", "slots", "C", "own"), CASES, ids=str)
def test_it_is_the_softmax_of_each_row(monkeypatch, H, K, D, prompts, slots, C, own, dtype, programs):
    """Masked keys have the value 99, so that a missing mask changes the result."""
    if DEVICE == "cuda" and dtype == torch.float32:
        pytest.skip("a card has no registers for it")
    monkeypatch.setattr(module, "PROGRAMS", programs)
    B = len(prompts)
    P = max(prompts)
    R = B * slots
    q, *keys = (numbers(*shape, dtype=dtype) for shape in ((R, H, D), *[(B, K, P, D)] * 2, *[(R, K, C, D)] * 2))
    there = (own - torch.arange(R) % 3).clamp(min=1)  # the keys of each row after its prompt
    hidden = [torch.arange(P) >= torch.tensor(prompts)[:, None], torch.arange(C) >= there[:, None]]
    masks = [torch.zeros(unseen.shape, dtype=dtype).masked_fill(unseen, float("-inf")) for unseen in hidden]
    for x, unseen in zip(keys, (hidden[0], hidden[0], hidden[1], hidden[1]), strict=True):
        x.masked_fill_(unseen[:, None, :, None], 99)
    k, v, own_k, own_v = keys
    given = [x.to(DEVICE) for x in (q, k, v, masks[0], own_k, own_v, masks[1])]
    assert module.fits(given[0])
    found = module.decode_attention(*given).cpu()

    def joined(prompt_keys, num_row_keys):
        """Return prompt keys and row keys together: (rows, heads, prompt keys + row keys, head_dim)."""
        keys = torch.cat([prompt_keys.repeat_interleave(slots, 0), num_row_keys], 2)
        return keys.double().repeat_interleave(H // K, 1)

    mask = torch.cat([masks[0].repeat_interleave(slots, 0), masks[1]], 1).double()
    scores = joined(k, own_k) @ q.double()[..., None] * D**-0.5 + mask[:, None, :, None]
    expected = (scores.softmax(2).mT @ joined(v, own_v))[:, :, 0]
    for row, exact in zip(found.double(), expected, strict=True):
        assert (row - exact).norm() <= TOLERANCE[dtype] * exact.norm()
    assert found.dtype == dtype


def test_which_queries_it_takes():
    assert module.fits(numbers(1, 4, 16, dtype=torch.float32)) == INTERPRETED
    assert not module.fits(numbers(1, 4, 24, dtype=torch.float32)) and not module.fits(numbers(1, 4, 16))
