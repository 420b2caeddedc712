"""Test LoRA: a layer and its gradients against PEFT, selected layers, and adapter copies."""

import copy
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minivlmrl.config.options import LoRAOptions
from minivlmrl.distributed.weights import rollout_weights
from minivlmrl.kernels.float32_matmul import tf32_products
from minivlmrl.model import lora
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.peft import gather_adapter
from tests.helpers import tiny

EVERYTHING = ["language", "vision", "merger"]


def adapted(target=EVERYTHING, r=4, model_type="qwen2_5_vl", dtype=torch.float64, random_b=True):
    """Return a model with adapters, whose B matrices are random if `random_b` and otherwise 0."""
    model = tiny.model(dtype=dtype, model_type=model_type)
    lora.inject_adapters(model, LoRAOptions(r=r, alpha=8.0, target=list(target)))
    lora.init_adapters(model, 0)
    generator = torch.Generator().manual_seed(1)
    for layer in lora.adapters(model).values() if random_b else ():
        layer.lora_B.data.normal_(0, 0.3, generator=generator)
    return model


def batch(model):
    generator = torch.Generator().manual_seed(2)
    completions = [[tiny.completion(generator, n) for n in (3, 5)]]
    return tiny.pack([tiny.prompt(generator, [(1, 4, 8)])], completions, model.config)


def loss(model):
    return -per_token_logps(model, batch(model))[0].mean()


def check_peft(p=0.0, drop=None):
    """Compare outputs and gradients with PEFT in float64; return our layer, PEFT's model and the input."""
    peft = pytest.importorskip("peft", reason="oracle missing: pip install peft")
    torch.manual_seed(4)
    theirs = torch.nn.Sequential(torch.nn.Linear(5, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    layer = lora.LoRALinear(copy.deepcopy(theirs[0]), 2, 1.5)
    config = peft.LoraConfig(r=2, lora_alpha=3, lora_dropout=p, target_modules=["0"])
    theirs = peft.get_peft_model(theirs, config).double().train()
    if drop:
        layer.drop = theirs.base_model.model[0].lora_dropout["default"].forward = drop
    mine = [p for name, p in layer.named_parameters() if "lora_" in name]
    other = {p.shape: p for name, p in theirs.named_parameters() if "lora_" in name}
    for own in mine:
        other[own.shape].data += 0.3 * torch.randn_like(own)
        own.data.copy_(other[own.shape])
    for model in (layer, theirs):
        (model(x) ** 2).sum().backward()
    torch.testing.assert_close(layer(x), theirs(x), rtol=1e-12, atol=1e-12)
    for own in mine:
        torch.testing.assert_close(own.grad, other[own.shape].grad, rtol=1e-10, atol=1e-12)
    return layer, theirs, x


def test_a_layer_matches_peft():
    layer, theirs, _ = check_peft()
    torch.testing.assert_close(layer.plain_weight(), theirs.merge_and_unload()[0].weight, rtol=1e-12, atol=1e-12)


def test_new_adapters_change_nothing_and_are_initialized_as_in_peft():
    plain = tiny.model()
    model = adapted(dtype=torch.float32, random_b=False)
    with torch.no_grad():
        assert torch.equal(plain(batch(plain)), model(batch(model)))
    for layer in lora.adapters(model).values():
        bound = layer.in_features**-0.5
        assert bound * 0.9 < layer.lora_A.abs().max() <= bound and not layer.lora_B.any()


@pytest.mark.parametrize(
    ("target", "expected"), [("lm_head", "it must be language,"), ("(", "not a valid regular expression")]
)
def test_a_target_without_layers_is_refused(target, expected):
    with pytest.raises(ValueError, match=rf"target is .*{expected}"):
        adapted([target])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Treat the CPU as a GPU in model/lora.py, so that bfloat16 and float16 take the paths of a GPU."""
    monkeypatch.setattr(lora, "is_half_on_gpu", lambda device, dtype: dtype in (torch.float16, torch.bfloat16))


@pytest.mark.parametrize("quantized", [False, True])
def test_a_rollout_on_a_gpu_uses_16_bit_copies(as_on_a_gpu, quantized):
    """A rollout uses rounded 16-bit copies of adapters at fixed addresses, and restores the trained parameters."""
    model = adapted(dtype=torch.bfloat16)
    if quantized:
        lora.quantize_base(model)
    originals = tiny.adapter_parameters(model)
    expected = model(batch(model)).detach().double()
    with pytest.raises(KeyError), rollout_weights(model, True) as used:
        copies = tiny.adapter_parameters(used)
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(copies, originals, strict=True))
        difference = used(batch(model)).double() - expected
        assert 0 < difference.norm() < 0.1 * expected.norm()
        assert all(a is b for a, b in zip(copies, tiny.adapter_parameters(used), strict=True))
        raise KeyError
    assert all(a is b for a, b in zip(originals, tiny.adapter_parameters(model), strict=True))
    assert torch.equal(model(batch(model)).double(), expected)


@pytest.mark.parametrize("base", [torch.float64, torch.bfloat16])
def test_a_tf32_adapter_has_the_gradients_of_autograd(base):
    """A bfloat16 base model rounds the result and the gradient of the input, but no other sum."""
    torch.manual_seed(5)
    x, base_result = torch.randn(7, 6).to(base), torch.randn(7, 4).to(base)
    given = [base_result, x, torch.randn(3, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)]
    given = [tensor.requires_grad_() for tensor in given]
    upstream = torch.randn(7, 4).to(base)
    ours = lora.AdapterSum.apply(*given, 1.5, tf32_products)
    wide_base, wide_x, A, B = (tensor.double() for tensor in given)
    expected = wide_base + 1.5 * wide_x @ A.T @ B.T
    assert torch.allclose(ours.double(), expected.to(base).double(), rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(ours, given, upstream)
    for mine, reference in zip(found, torch.autograd.grad(expected, given, upstream.double()), strict=True):
        assert mine.dtype == reference.dtype
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


class ProductPrecision(TorchDispatchMode):
    """Record the dtype of each matrix product, and the precision of float32 products at that moment."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.found.append((result.dtype, torch.backends.cuda.matmul.fp32_precision))
        return result


def test_tf32_is_on_for_the_products_of_adapters_only(as_on_a_gpu, monkeypatch):
    """The TF32 setting is restored, even after an error, and never changes on a CPU."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    layer = lora.LoRALinear(torch.nn.Linear(6, 4).bfloat16(), 3, 1.5)
    x = torch.randn(7, 6).bfloat16().requires_grad_()
    with ProductPrecision() as products:
        layer(x).float().sum().backward()
    # forward: x W^T, x A^T and (x A^T) B^T; backward: gradients of W and x, and then of x A^T, x, A and B
    base, adapter = (torch.bfloat16, before), (torch.float32, "tf32")
    assert sorted(products.found, key=str) == sorted(3 * [base] + 6 * [adapter], key=str)
    with pytest.raises(KeyError), tf32_products():
        with tf32_products():
            pass
        assert setting.fp32_precision == "tf32"
        raise KeyError
    assert setting.fp32_precision == before != "tf32"
    monkeypatch.setattr(lora, "is_half_on_gpu", lambda device, dtype: False)
    with ProductPrecision() as products:
        layer(x).float().sum().backward()
    assert {precision for _, precision in products.found} == {before}


def test_adapter_config_names_the_dropout_of_the_training(tmp_path):
    model = tiny.model()
    lora.inject_adapters(model, LoRAOptions(r=2, dropout=0.25))
    gather_adapter(model)(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_dropout"] == 0.25
