"""Compare the estimated FLOPs with PyTorch's FlopCounterMode."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minivlmrl.config.options import LoRAOptions
from minivlmrl.extras.memory.flops import flops_by_input
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
