"""Test that cumulative sums in blocks equal torch's cumsum, and that no long row is summed at once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minivlmrl.kernels.exact_cumsum import BLOCK, running_sum


class Lengths(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "cumsum" in func.name():
            self.found = [*getattr(self, "found", []), out.shape[-1]]
        return out


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 1000, 151_936])
def test_sums_by_blocks_are_those_of_one_pass(length):
    x = torch.randint(2**52 // length, (5, length), generator=torch.Generator().manual_seed(length))
    with Lengths() as sums:
        found = running_sum(x)
    assert torch.equal(found, x.cumsum(-1)) and max(sums.found) <= 1187
