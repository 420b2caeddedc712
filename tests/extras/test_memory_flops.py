"""Compare the estimated FLOPs with PyTorch's FlopCounterMode."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minivlmrl.config.options import LoRAOptions
from minivlmrl.extras.memory.flops import find_card, flops_by_input
from minivlmrl.model.lora import inject_adapters, quantize_base
from minivlmrl.model.trainable import select_trained
from tests.helpers import tiny
from tests.model.test_logprobs import groups


def counted(model, batch) -> int:
    """Count the FLOPs of products with weights in a forward and backward pass, without attention."""
    aten = torch.ops.aten
    with FlopCounterMode(display=False) as counter:
        model.lm_head(model(batch, select=batch.layout.predict_index)).sum().backward()
    products = aten.mm, aten.addmm, aten.convolution, aten.convolution_backward
    return sum(counter.get_flop_counts()["Global"].get(product, 0) for product in products)


def estimated(model, batch) -> float:
    flops = flops_by_input(model, model.config)
    return (
        flops["tokens"] * len(batch.input_ids)
        + flops["scored"] * len(batch.completion_ids)
        + flops["patches"] * len(batch.pixel_values)
        + flops["merged"] * len(batch.vision_index)
    )


MODELS = [
    ("qwen2_vl", False, ["language"]), ("qwen2_5_vl", True, []),
    ("qwen2_5_vl", False, ["vision"]),  # gradients end at the norm of the merger
    ("qwen3_vl", False, ["vision", "merger"]), ("qwen3_vl", False, []),
    ("qwen3_vl_moe", False, []),  # a token is computed by some of the experts
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "tied", "freeze"), MODELS, ids=str)
def test_products_with_weights_are_counted_exactly(model_type, tied, freeze):
    model = tiny.model(tied, model_type=model_type)
    select_trained(model, freeze)
    batch = tiny.pack(*groups(3), model.config)
    assert estimated(model, batch) == counted(model, batch)


def test_recurrence_is_not_counted():
    """The estimate leaves out the products of the recurrence, which have no weights."""
    model = tiny.model(model_type="qwen3_5_moe")
    batch = tiny.pack(*groups(3), model.config)
    assert 0.85 * counted(model, batch) < estimated(model, batch) < counted(model, batch)


def test_adapters_have_no_gradients_of_base_weights():
    """The estimate is a little high, because the inputs of the first layer have no gradient."""
    model = tiny.model()
    batch = tiny.pack(*groups(3), model.config)
    full = estimated(model, batch)
    inject_adapters(model, LoRAOptions(r=2, target=["language"]))
    select_trained(model, [])
    ours = estimated(model, batch)
    assert counted(model, batch) <= ours <= 1.1 * counted(model, batch) and ours < 0.8 * full
    quantize_base(model)
    assert estimated(model, batch) == ours


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H100 80GB HBM3", 9.89e14), ("NVIDIA H100 PCIe", 7.56e14), ("NVIDIA A10", 1.25e14), ("NVIDIA A10G", 7.0e13),
    ("NVIDIA L4", 1.21e14), ("NVIDIA L40S", 3.62e14), ("Tesla T4", 8.1e12), ("NVIDIA A40", 1.5e14),
    ("NVIDIA RTX 6000 Ada Generation", 3.64e14), ("NVIDIA RTX A4000", 7.67e13), ("NVIDIA GeForce RTX 4090", 1.65e14),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 8.6e13), ("NVIDIA GH200 480GB", 9.89e14),
    ("NVIDIA GeForce RTX 3060 Ti", None), ("NVIDIA GeForce RTX 4080 Laptop GPU", None), ("Quadro RTX 6000", None),
])  # fmt: skip
def test_the_peak_is_that_of_the_card_in_bfloat16(name, peak):
    card = find_card(name)
    assert (card and card.flops) == peak
