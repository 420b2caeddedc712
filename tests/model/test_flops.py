"""Compare the estimated FLOPs with PyTorch's FlopCounterMode."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minivlmrl.config.options import LoRAOptions
from minivlmrl.model.flops import batch_flops, flops_by_input, peak_flops
from minivlmrl.model.lora import inject_adapters, quantize_base
from minivlmrl.model.trainable import select_trained
from tests.helpers import tiny
from tests.helpers.tiny import pack
from tests.model.test_logprobs import groups


def counted(model, batch) -> int:
    """Count the FLOPs in products with weights in a forward and backward pass, without attention."""
    aten = torch.ops.aten
    with FlopCounterMode(display=False) as counter:
        model.lm_head(model(batch, select=batch.layout.predict_index)).sum().backward()
    products = aten.mm, aten.addmm, aten.convolution, aten.convolution_backward
    return sum(counter.get_flop_counts()["Global"].get(product, 0) for product in products)


@pytest.mark.parametrize("freeze", [[], ["vision"], ["vision", "merger"], ["language"]], ids=str)
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_products_with_weights_are_counted_exactly(model_type, freeze):
    """With frozen tower blocks, gradients end at the merger's norm."""
    model = tiny.model(model_type=model_type)
    select_trained(model, freeze)
    batch = pack(*groups(3), model.config)
    ours = batch_flops(flops_by_input(model, model.config), batch)
    assert ours == counted(model, batch)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_recurrence_is_not_counted(model_type):
    """The remaining FLOPs are the recurrence's products, which have no weights."""
    model = tiny.model(model_type=model_type)
    batch = pack(*groups(3), model.config)
    ours = batch_flops(flops_by_input(model, model.config), batch)
    assert 0.85 * counted(model, batch) < ours < counted(model, batch)


def test_a_tied_head_counts():
    model = tiny.model(tied=True)
    batch = pack(*groups(2), model.config)
    assert batch_flops(flops_by_input(model, model.config), batch) == counted(model, batch)


def test_adapters_have_no_gradients_of_base_weights():
    """The estimate is a little high, because the first layer's inputs have no gradient."""
    model = tiny.model()
    full = flops_by_input(model, model.config)
    inject_adapters(model, LoRAOptions(r=2, target=["language"]))
    select_trained(model, [])
    batch = pack(*groups(3), model.config)
    ours = batch_flops(flops_by_input(model, model.config), batch)
    assert counted(model, batch) <= ours <= 1.1 * counted(model, batch)
    assert ours < 0.8 * batch_flops(full, batch)
    quantize_base(model)
    assert batch_flops(flops_by_input(model, model.config), batch) == ours


def test_only_the_chosen_experts_of_a_token_count():
    model = tiny.model(model_type="qwen3_vl_moe")
    batch = pack(*groups(2), model.config)
    assert batch_flops(flops_by_input(model, model.config), batch) == counted(model, batch)


def test_cached_images_are_not_computed_again():
    model = tiny.model()
    batch = pack(*groups(2), model.config)
    flops = flops_by_input(model, model.config)
    whole = batch_flops(flops, batch)
    batch.vision_embeds = torch.zeros(0)
    tower = flops["patches"] * len(batch.pixel_values) + flops["merged"] * len(batch.vision_index)
    assert batch_flops(flops, batch) == whole - tower < whole


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA A10", 1.25e14),
        ("NVIDIA L4", 1.21e14),
        ("NVIDIA L40S", 3.62e14),
        ("NVIDIA GeForce RTX 4090", 1.65e14),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_is_that_of_the_card_in_bfloat16(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda:0"), "bfloat16") == peak
    assert peak_flops(torch.device("cuda:0"), "float32") is None
    assert peak_flops(torch.device("cpu"), "bfloat16") is None
