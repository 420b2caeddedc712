"""The names of Qwen2-VL's config.json, and the MLP of its tower."""

import pytest
import torch

from minivlmrl.hub.qwen2_vl import QuickGELUMLP, read_vision


def test_qwen2_vl_has_other_names_on_the_hub():
    found = read_vision({"embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "depth": 32}, "config.json")
    assert (found["hidden_size"], found["intermediate_size"], found["out_hidden_size"]) == (1280, 5120, 1536)
    with pytest.raises(ValueError, match=r"config.json: vision_config.embed_dim is 1.5, it must be of type int"):
        read_vision({"embed_dim": 1.5}, "config.json")


def test_the_mlp_is_fc2_of_quick_gelu_of_fc1():
    mlp, x = QuickGELUMLP(3, 5, bias=True).double(), torch.randn(4, 3, dtype=torch.float64)
    hidden = mlp.fc1(x)
    expected = mlp.fc2(hidden / (1 + (-1.702 * hidden).exp()))
    assert torch.allclose(mlp(x), expected, rtol=1e-13, atol=1e-14)
