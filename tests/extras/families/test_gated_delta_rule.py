"""Compare the gated delta rule in chunks with its definition: values, states and gradients in float64."""

import pytest
import torch

from minivlmrl.extras.families.gated_delta_rule import by_definition, gated_delta_rule


def inputs(T, forget, b=2, H=3, K=5, V=4):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(b, T, H, n, generator=random, dtype=torch.float64) for n in (K, K, V))
    beta, g = (torch.rand(b, T, H, generator=random, dtype=torch.float64) for _ in "ab")
    state = torch.randn(b, H, K, V, generator=random, dtype=torch.float64)
    found = q, k / k.norm(dim=-1, keepdim=True), v, beta, -forget * g, state
    return [x.requires_grad_() for x in found]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


@pytest.mark.parametrize("T", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("forget", [0.0, 1.0, 30.0])
def test_chunks_equal_the_definition(T, forget):
    given = inputs(T, forget)
    found = []
    for rule in (gated_delta_rule, by_definition):
        out, state = rule(*given)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found.append([out, state, *torch.autograd.grad((out * weight).sum() + (state * state).sum(), given)])
    assert_equal(*found)
