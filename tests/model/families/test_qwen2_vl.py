"""Test the names in Qwen2-VL's config.json; test_decoder.py tests the model."""

import pytest

from minivlmrl.model.families.qwen2_vl import read_vision


def test_qwen2_vl_has_other_names_on_the_hub():
    found = read_vision({"embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "depth": 32}, "config.json")
    assert (found["hidden_size"], found["intermediate_size"], found["out_hidden_size"]) == (1280, 5120, 1536)
    with pytest.raises(ValueError, match=r"config.json: vision_config.embed_dim is 1.5, but it must be of type int"):
        read_vision({"embed_dim": 1.5}, "config.json")
