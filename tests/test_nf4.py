"""NF4 under adapters: bitsandbytes' bits, products and gradients of the weights that they mean, runs, merge."""

import copy

import pytest
import torch
from on_ranks import shards_bytes
from record_bitsandbytes import SHAPE, digest, numbers, recorded
from test_lora import adapted, batch, loss
from torch import nn

from minivlmrl.__main__ import main
from minivlmrl.adapters import nf4
from minivlmrl.adapters.adamw8bit import dynamic_code
from minivlmrl.adapters.lora import adapters, quantize_base
from minivlmrl.adapters.nf4 import NF4, pack, unpack
from minivlmrl.adapters.peft_folder import load_adapter
from minivlmrl.adapters.trained import table
from minivlmrl.algorithms.value_model import ValueModel
from minivlmrl.scale.checkpoint import load_model
from minivlmrl.scale.sharding import copy_model


def test_bits_are_those_of_bitsandbytes(fused_linspace, monkeypatch):
    monkeypatch.setattr(nf4, "dynamic_code", dynamic_code.__wrapped__)  # what is cached has its own linspace
    theirs, packed = recorded(), pack(numbers())
    assert torch.equal(torch.tensor(NF4), torch.tensor(theirs["nf4"]))
    theirs = theirs["nf4 numbers"]
    assert all(digest(packed[name]) == theirs[name] for name in ("packed", "scale_indices", "scale_scales"))
    assert packed["offset"].item() == theirs["offset"]
    assert digest(unpack(**packed)) == theirs["values"]
    assert sum(x.nbytes for x in packed.values()) * 8 / (SHAPE[0] * SHAPE[1]) == pytest.approx(4.127, abs=0.001)


@pytest.mark.parametrize("shape", [(3, 5), (64, 2), (7, 64), (601, 500)])
def test_any_shape(shape):
    """A number is off by half the widest gap, 0.152 of its block's largest, and by the scale's 8 bits."""
    weight = torch.randn(shape)
    off = (unpack(**pack(weight))[: weight.numel()].view(shape) - weight).abs().max()
    assert off < 0.16 * weight.abs().max()


@pytest.fixture(params=[{}, {"model_type": "qwen3_vl"}], ids=str)
def pair(request):
    """A quantized model in float64, and one whose weights are plain and the same numbers."""
    model = adapted(**request.param)
    plain, names = copy.deepcopy(model), list(adapters(model))
    before = plain.model.layers[0].mlp.up_proj.base.weight.clone()
    quantize_base(model)
    for name in names:
        weight = model.get_submodule(name).base.weight
        plain.get_submodule(name).base.weight = nn.Parameter(weight, requires_grad=False)
    assert not torch.equal(before, plain.model.layers[0].mlp.up_proj.base.weight)
    return model, plain


def test_products_and_gradients_are_those_of_the_unpacked_weights(pair):
    found = []
    for model in pair:
        value = loss(model)
        value.backward()
        found.append((value, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (value, gradients), (expected, others) = found
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == others.keys() and len(gradients) >= 2 * len(adapters(pair[0]))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-10, atol=1e-12)
    merged, plain = (model.model.layers[0].mlp.up_proj.merged() for model in pair)
    assert torch.equal(merged, plain) and table(pair[0]) == table(pair[1])


def test_a_copy_shares_the_packed_base(pair):
    """A value model of the same base costs adapters and a head."""
    model, _ = pair
    twin = ValueModel(copy_model(model)).backbone
    name = next(iter(adapters(model)))
    assert twin.get_submodule(name).base.packed is model.get_submodule(name).base.packed
    assert torch.equal(twin(batch(model)), model(batch(model)))


NF4_RUN = ["--adapter.r=4", "--adapter.quantize=nf4"]


@pytest.mark.parametrize(("stages", "options"), [
    ("[sft, grpo]", []), ("[ppo]", []),
    shards_bytes("[ppo]", ["--sharding.enabled=true", "--model.compute_dtype=bfloat16"]),
])  # fmt: skip
def test_a_run_writes_the_unpacked_base_and_its_adapter(run, plain, own, checkpoint, tmp_path, stages, options):
    small = [f"--{s}.max_steps=2" for s in ("sft", "grpo", "ppo")] + ["--grpo.beta=0.1"]
    folder = run(*own, *NF4_RUN, *small, *options, f"--stages={stages}", "--data.eval_rows=1")
    model = load_model(checkpoint)
    load_adapter(model, folder / "checkpoint" / "adapter")
    quantize_base(model)
    written, layers = dict(load_model(folder / "checkpoint").named_parameters()), adapters(model)
    assert layers and all(torch.equal(written[f"{name}.weight"], layer.merged()) for name, layer in layers.items())
    options = [f"--model={checkpoint}", f"--adapter={folder / 'checkpoint' / 'adapter'}", "--quantize=nf4"]
    assert main(["merge", *options, f"--out={tmp_path / 'merged'}"]) == 0
    merged = dict(load_model(tmp_path / "merged").named_parameters())
    assert merged.keys() == written.keys() and all(torch.equal(merged[name], p) for name, p in written.items())
