"""Test NF4 for a frozen decoder: packed layers, bits equal to bitsandbytes, gradients, runs and merging."""

import copy
from argparse import Namespace

import pytest
import torch
from torch import nn

from minivlmrl.__main__ import main
from minivlmrl.config.options import LoRAOptions
from minivlmrl.distributed.weights import copy_model
from minivlmrl.extras.answers.chat import inference_config
from minivlmrl.model import nf4, peft, value_head
from minivlmrl.model.checkpoint import load_model
from minivlmrl.model.families.registry import FAMILIES, hub_name
from minivlmrl.model.lora import adapters, inject_adapters, quantize_base
from minivlmrl.model.nf4 import NF4, dynamic_code, pack_nf4, unpack_nf4
from minivlmrl.model.plain_weights import gather_full_tensor, packed_layers, part_of, plain_weights
from minivlmrl.monitor.check.summary import trainable_summary
from tests.helpers.on_ranks import shards_bytes
from tests.model.test_lora import adapted, batch, loss
from tests.record.record_bitsandbytes import SHAPE, digest, numbers, recorded

UP = "model.layers.0.mlp.up_proj.weight"


def test_packed_bits_match_bitsandbytes(fused_linspace, monkeypatch):
    # the cached table was computed with the linspace of torch
    monkeypatch.setattr(nf4, "dynamic_code", dynamic_code.__wrapped__)
    theirs, packed = recorded(), pack_nf4(numbers())
    assert torch.equal(torch.tensor(NF4), torch.tensor(theirs["nf4"]))
    theirs = theirs["nf4 numbers"]
    assert all(digest(packed[name]) == theirs[name] for name in ("packed", "scale_indices", "scale_scales"))
    assert packed["offset"].item() == theirs["offset"]
    assert digest(unpack_nf4(**packed)) == theirs["values"]
    assert sum(x.nbytes for x in packed.values()) * 8 / (SHAPE[0] * SHAPE[1]) == pytest.approx(4.127, abs=0.001)


# layers with adapters in the LoRA paper; QLoRA also quantizes the other decoder layers
QV = r"model\..*\.[qv]_proj"
FEW = [QV, "merger"]


@pytest.fixture(params=[{}, {"model_type": "qwen3_vl", "target": FEW}, {"target": FEW}], ids=str)
def pair(request):
    model = adapted(**request.param)
    plain = copy.deepcopy(model)
    before = gather_full_tensor(plain_weights(plain)[UP])
    quantize_base(model)
    for name, layer in packed_layers(model).items():
        plain.get_submodule(name).weight = nn.Parameter(layer.weight, requires_grad=False)
    assert not torch.equal(before, gather_full_tensor(plain_weights(plain)[UP]))
    return model, plain


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_packed_layers_are_those_of_transformers(tmp_path, model_type):
    """transformers also converts the vision tower to NF4, unlike this package."""
    pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    from tests.helpers.oracle import saved_pair

    theirs, model = saved_pair(tmp_path, model_type)
    names = {hub_name(name) for name, module in theirs.named_modules() if isinstance(module, nn.Linear)}
    kept = get_keys_to_not_convert(theirs)
    inject_adapters(model, LoRAOptions(r=2, target=FEW, quantize="nf4"))
    packed = {name.removesuffix(".base") for name in packed_layers(model)}
    decoder = {name for name in names if name.startswith("model.") and should_convert_module(name, kept)}
    # transformers does not convert experts, and neither library converts routers
    experts = {name for name in packed if ".mlp.experts." in name}
    assert bool(experts) == model_type.endswith("moe") and not any(name.endswith("mlp.gate") for name in packed)
    packed -= experts
    names |= {name for name, module in model.named_modules() if name.endswith("mlp.gate")}
    assert packed == decoder | {name for name in adapters(model) if part_of(name) == "merger"}
    assert names - packed == {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert len(adapters(model)) < len(packed) and kept == ["lm_head"] and "lm_head" not in packed


def test_outputs_and_gradients_equal_those_of_the_unpacked_weights(pair):
    found = []
    for model in pair:
        value = loss(model)
        value.backward()
        found.append((value, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (value, gradients), (expected, others) = found
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == others.keys() and len(gradients) >= 2 * len(adapters(pair[0]))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-12, atol=1e-14)
    merged, plain = (plain_weights(model) for model in pair)
    assert merged.keys() == plain.keys() and trainable_summary(pair[0]) == trainable_summary(pair[1])
    for name, weight in merged.items():
        assert torch.equal(gather_full_tensor(weight), gather_full_tensor(plain[name]))


def test_a_copy_shares_the_packed_base(pair):
    """A value model on the same base adds only adapters and a head."""
    model, _ = pair
    twin = value_head.ValueModel(copy_model(model)).backbone
    theirs = packed_layers(twin)
    assert all(theirs[name].packed is layer.packed for name, layer in packed_layers(model).items())
    assert torch.equal(twin(batch(model)), model(batch(model)))


@pytest.mark.parametrize(("stages", "options"), [
    ("[sft, grpo]", []), ("[ppo]", [f"--adapter.target=['{QV}', merger]"]),
    shards_bytes("[ppo]", ["--sharding.enabled=true", "--model.compute_dtype=bfloat16"]),
])  # fmt: skip
def test_a_run_writes_the_unpacked_base_and_its_adapter(run, quick, user_data, checkpoint, tmp_path, stages, options):
    small = [f"--{s}.max_steps=2" for s in ("sft", "grpo", "ppo")] + ["--grpo.beta=0.1"]
    folder = run(*user_data, "--adapter.r=4", "--adapter.quantize=nf4", *small, *options, f"--stages={stages}")
    model = load_model(checkpoint)
    peft.load_adapter(model, folder / "checkpoint" / "adapter")
    quantize_base(model)
    written, computed = dict(load_model(folder / "checkpoint").named_parameters()), plain_weights(model)
    assert adapters(model)
    assert all(torch.equal(written[name], gather_full_tensor(weight)) for name, weight in computed.items())
    adapter = folder / "checkpoint" / "adapter"
    assert inference_config(Namespace(model=str(adapter)), []).adapter.quantize == "nf4"  # also in chat
    options = [f"--model={checkpoint}", f"--adapter={adapter}", "--quantize=nf4"]
    assert main(["merge", *options, f"--out={tmp_path / 'merged'}"]) == 0
    merged = dict(load_model(tmp_path / "merged").named_parameters())
    assert merged.keys() == written.keys() and all(torch.equal(merged[name], p) for name, p in written.items())
