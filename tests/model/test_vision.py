"""Compare windows and norms of the vision tower with transformers 5.23; test_decoder.py compares its outputs."""

import random

import pytest
import torch

from minivlmrl.model import vision
from minivlmrl.model.lora import add_lora, quantize_layer
from tests.helpers import tiny

transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")


def test_windows_of_300_random_grids_equal_transformers():
    from transformers.vision_utils import get_vision_window_index

    config, rng = tiny.config().vision_config, random.Random(0)
    for _ in range(300):
        size = lambda: (rng.choice([1, 1, 2, 3]), 2 * rng.randint(1, 20), 2 * rng.randint(1, 20))  # noqa: E731
        grids = torch.tensor([size() for _ in range(rng.randint(1, 3))])
        sizes = config.spatial_merge_size, config.window_size, config.patch_size
        index, cu_seqlens = get_vision_window_index(grids, *sizes)
        order, window_lengths, frame_lengths = vision.window_order(grids, config)
        assert order.tolist() == torch.as_tensor(index).tolist(), grids
        assert frame_lengths == [h * w for t, h, w in grids.tolist() for _ in range(t)]
        assert torch.tensor([0, *window_lengths]).cumsum(0).tolist() == torch.unique_consecutive(cu_seqlens).tolist()


def test_a_layout_cached_in_inference_mode_works_in_a_backward():
    """The reference model may call first in inference mode, whose tensors a backward pass cannot use."""
    visual, grids = tiny.model().visual, torch.tensor([(1, 6, 4), (1, 4, 10)])
    vision.vision_layout.cache_clear()
    with torch.inference_mode():
        expected = visual(torch.ones(64, 1176), grids)
    out = visual(torch.ones(64, 1176), grids)
    assert torch.equal(out, expected) and vision.vision_layout.cache_info().hits == 1
    out.sum().backward()
    assert visual.patch_embed.proj.weight.grad.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
def test_padded_columns_change_nothing(bias):
    """A layer of 44 columns is padded to 48 columns."""
    torch.manual_seed(0)
    mlp = vision.MLP(32, 44, bias).double()
    x = torch.randn(5, 32, dtype=torch.float64, requires_grad=True)
    plain, padded = mlp(x), mlp.forward_padded(x, 4)
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
    inputs = [x, *mlp.parameters()]
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (padded, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_columns_are_padded_on_a_gpu_in_16_bits_only(monkeypatch):
    """The meta device stands for a GPU; adapters and packed weights need layers without padding."""
    padded = []
    original = vision.MLP.forward_padded
    monkeypatch.setattr(vision.MLP, "forward_padded", lambda *given: padded.append(given[2]) or original(*given))

    def missing(dtype=torch.bfloat16, columns=44, device="meta", change=lambda mlp: None):
        mlp = vision.MLP(32, columns, bias=True).to(device, dtype)
        change(mlp)
        padded.clear()
        assert mlp(torch.zeros(5, 32, dtype=dtype, device=device)).shape == (5, 32)
        return padded

    assert missing() == missing(torch.float16) == [4] and missing(columns=45) == [3]
    assert missing(columns=48) == missing(torch.float32) == missing(device="cpu") == []
    assert missing(change=lambda mlp: add_lora(mlp, "down_proj", 2, 1.0)) == []
    assert missing(change=lambda mlp: quantize_layer(mlp, "up_proj")) == []
