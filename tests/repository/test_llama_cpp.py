"""Convert our model folders with llama.cpp's converter. tests/llama_cpp.sh installs it and also compares answers."""

import json
from collections import Counter

import numpy as np
import pytest

from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import save_model
from minivlmrl.tasks import shapes
from tests.helpers import on_llama_cpp

# the converter's module
pytest.importorskip("conversion", reason="llama.cpp's converter is missing: tests/llama_cpp.sh installs it")
gguf = pytest.importorskip("gguf", reason="llama.cpp's converter is missing: tests/llama_cpp.sh installs it")


def converted_parts(name, weight, family):
    """Return the tensors that the converter makes from one weight in our model.

    For Qwen3.5, it changes three weight kinds: patch embedding, A_log and norms.
    """
    weight = weight.detach()
    if ".attn.qkv." in name and family.startswith("qwen2"):
        return weight.chunk(3)
    if name.endswith("patch_embed.proj.weight"):
        return weight.unbind(2)
    if name.endswith("A_log"):
        return [-weight.exp()]
    if family == "qwen3_5" and name.startswith("model.") and name.endswith("norm.weight") and "linear_attn" not in name:
        return [weight + 1]
    return [weight]


@pytest.mark.parametrize("family", on_llama_cpp.FAMILIES)
def test_every_tensor_is_ours_to_the_byte(tmp_path, family):
    config = on_llama_cpp.config_of(family)
    if family == "qwen3_5":
        config["text_config"]["linear_num_value_heads"] = 2  # with more value heads, the converter changes their order
    (tmp_path / "model.json").write_text(json.dumps(config))
    model, processor = random_model(tmp_path / "model.json", shapes.tokenizer(), 0)
    for weight in model.parameters():
        weight.data.normal_()  # no two tensors are equal
    save_model(tmp_path / "checkpoint", model, processor)
    on_llama_cpp.convert(tmp_path, ["f32"])
    found = Counter()
    for name in ("text", "mmproj"):
        reader = gguf.GGUFReader(tmp_path / f"{name}-f32.gguf")
        found.update(np.ascontiguousarray(tensor.data).tobytes() for tensor in reader.tensors)
    expected = Counter()
    for name, weight in model.named_parameters():
        expected.update(part.contiguous().numpy().tobytes() for part in converted_parts(name, weight, family))
    assert found == expected
