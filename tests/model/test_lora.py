"""Test LoRA: a layer and its gradients against PEFT, selected layers, and copies of adapters."""

import copy

import pytest
import torch

from minivlmrl.config.options import LoRAOptions
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import LoRALinear, adapter_parameters, adapters, init_adapters, inject_adapters
from minivlmrl.model.plain_weights import is_adapter
from minivlmrl.trainers.reference import SwappedParameters

import tiny
from tiny import pack

EVERYTHING = ["language", "vision", "merger"]


def adapted(target=EVERYTHING, r=4, model_type="qwen2_5_vl", dtype=torch.float64, lively=True):
    """Return a model with adapters. If lively, their B matrices are not 0."""
    model = tiny.model(dtype=dtype, model_type=model_type)
    inject_adapters(model, LoRAOptions(r=r, alpha=8.0, target=list(target)))
    init_adapters(model, 0)
    generator = torch.Generator().manual_seed(1)
    for layer in adapters(model).values() if lively else ():
        layer.lora_B.data.normal_(0, 0.3, generator=generator)
    return model


def batch(model):
    generator = torch.Generator().manual_seed(2)
    completions = [[tiny.completion(generator, n) for n in (3, 5)]]
    return pack([tiny.prompt(generator, [(1, 4, 8)])], completions, model.config)


def loss(model):
    return -per_token_logps(model, batch(model))[0].mean()


def check_peft(p=0.0, drop=None):
    """Compare outputs and gradients of a layer with PEFT's in float64.

    Return our layer, PEFT's model and their input.
    """
    peft = pytest.importorskip("peft", reason="oracle missing: pip install peft")
    torch.manual_seed(4)
    theirs = torch.nn.Sequential(torch.nn.Linear(5, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    layer = LoRALinear(copy.deepcopy(theirs[0]), 2, 1.5)
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


def test_new_adapters_change_nothing_and_are_initialised_as_in_peft():
    plain = tiny.model()
    model = adapted(dtype=torch.float32, lively=False)
    with torch.no_grad():
        assert torch.equal(plain(batch(plain)), model(batch(model)))
    for layer in adapters(model).values():
        bound = layer.in_features**-0.5
        assert bound * 0.9 < layer.lora_A.abs().max() <= bound and not layer.lora_B.any()


@pytest.mark.parametrize(
    ("target", "names"),
    [("language", 3 * 7), ("vision", 4 * 5), ("merger", 2), (r".+\.[qv]_proj", 3 * 2), (r".*", 3 * 7 + 4 * 5 + 2)],
)
def test_targets(target, names):
    assert len(adapters(adapted([target]))) == names


@pytest.mark.parametrize(
    ("target", "says"), [("lm_head", "it must be language,"), ("(", "not a valid regular expression")]
)
def test_a_target_without_layers_is_refused(target, says):
    with pytest.raises(ValueError, match=rf"target is .*{says}"):
        adapted([target])


def test_swapped_parameters_restore_earlier_adapters():
    """The saved adapters can be swapped in repeatedly.

    Afterwards, also after an error, the model has its own adapters again. Older graphs stay valid.
    """
    model = adapted()
    before = loss(model).detach()
    kept = SwappedParameters(model, [name for name, _ in model.named_parameters() if is_adapter(name)])
    assert len(list(kept.parameters())) == len(adapter_parameters(model)) > 0  # without the base
    assert not any(parameter.requires_grad for parameter in kept.parameters())
    for layer in adapters(model).values():
        layer.lora_B.data *= 1.5
    after = loss(model).detach()
    graph = loss(model)
    expected = torch.autograd.grad(loss(model), adapter_parameters(model))
    assert after != before
    for _ in range(2):
        with pytest.raises(KeyError), kept.swapped_in() as used:
            assert used is model and torch.equal(loss(model), before)
            raise KeyError
        assert torch.equal(loss(model), after)
    found = torch.autograd.grad(graph, adapter_parameters(model))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_on_a_bfloat16_base_the_adapter_is_in_float32():
    model = adapted(dtype=torch.bfloat16)
    assert {layer.lora_B.dtype for layer in adapters(model).values()} == {torch.float32}
    assert model(batch(model)).dtype == torch.bfloat16
