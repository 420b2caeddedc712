"""Compare mixture-of-experts models with transformers 5.23: logits, gradients, loss and files."""

import random
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivlmrl.config.options import LoRAOptions
from minivlmrl.distributed.saving import save_model
from minivlmrl.extras.families.experts import Experts
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
from minivlmrl.model import config_json
from minivlmrl.model.checkpoint import load_model
from minivlmrl.model.families.registry import find_family, hub_name
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import adapters, init_adapters, inject_adapters
from minivlmrl.model.nf4 import NF4Linear
from minivlmrl.monitor.memory.estimate import MemoryEstimator
from tests.extras.families.test_qwen3_vl import random_config, random_prompt
from tests.helpers import tiny
from tests.helpers.hub_configs import real_config
from tests.helpers.oracle import CLASSES, EAGER, in_float64, their_inputs, transformers

MOE = ("qwen3_vl_moe", "qwen3_5_moe")


def random_experts(model_type: str, seed: int):
    """Return a random config with 2 to 9 experts, some with dense layers or a shared expert."""
    rng = random.Random(seed)
    count = rng.randint(2, 9)
    sizes = {"num_experts": count, "num_experts_per_tok": rng.randint(1, count)}
    sizes["moe_intermediate_size"] = rng.choice([8, 12, 24])
    if model_type == "qwen3_5_moe":
        sizes["shared_expert_intermediate_size"] = rng.choice([4, 16])
    else:
        sizes["mlp_only_layers"] = rng.sample(range(5), rng.choice([0, 0, 1]))
        sizes["decoder_sparse_step"] = rng.choice([1, 2])
    return random_config(model_type, rng, **sizes)


def loss_of(logps, mask, seed):
    advantages = torch.randn(len(logps), generator=torch.Generator().manual_seed(seed)).double()
    normalizer = LossNormalizer(len(logps), int(mask.sum()), 9)
    return grpo_loss(logps, advantages, mask, loss_type="grpo", normalizer=normalizer)[0]


def single_rows(theirs, rows, groups):
    """Return log-probabilities and logits of all completions, which transformers computes row by row."""
    logps, logits = [], []
    for row, ids in ((row, ids) for row, group in zip(rows, groups, strict=True) for ids in group):
        whole = replace(row, input_ids=torch.cat([row.input_ids, ids]))
        found = theirs(**their_inputs(whole)).logits[0, -len(ids) - 1 : -1]
        logits.append(found)
        logps.append(found.log_softmax(-1).gather(1, ids[:, None])[:, 0])
    return torch.cat(logps), torch.cat(logits)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("model_type", MOE)
def test_20_random_configs_equal_transformers(model_type, seeds, tmp_path, monkeypatch):
    in_float64(monkeypatch, model_type)
    for seed in seeds:
        config, generator = random_experts(model_type, seed), torch.Generator().manual_seed(seed)
        theirs = transformers.AutoConfig.for_model(**config_json.to_dict(config))
        theirs = tiny.telling_weights(CLASSES[model_type]._from_config(theirs, **EAGER).double().eval())
        theirs.tie_weights()
        theirs.save_pretrained(tmp_path / str(seed))
        ours = load_model(tmp_path / str(seed), torch.float64)
        rows = [random_prompt(config, generator, grids) for grids in ([], [(2, 3)], [(1, 4), (5, 2)])]
        groups = [[tiny.completion(generator, n) for n in lengths] for lengths in ((5, 2), (3, 7, 1), (4,))]
        batch = tiny.pack(rows, groups, ours.config)
        logps, _ = per_token_logps(ours, batch)
        expected, their_logits = single_rows(theirs, rows, groups)
        with torch.no_grad():
            logits = ours.lm_head(ours(batch, select=batch.layout.predict_index))
        assert (logits - their_logits).abs().max() <= 1e-12 * their_logits.abs().max(), seed
        losses = [loss_of(batch.pad(x), batch.completion_mask, seed) for x in (logps, expected)]
        assert abs(losses[0] - losses[1]) <= 1e-12 * abs(losses[1]), seed
        for loss in losses:
            loss.backward()
        gradients = ((hub_name(name), p.grad) for name, p in theirs.named_parameters())
        gradients = dict(find_family("qwen3_5_moe").split_tensors(gradients, ours.config, "theirs"))
        largest = max(gradient.abs().max() for gradient in gradients.values() if gradient is not None)
        for name, p in ours.named_parameters():
            found = torch.zeros_like(p) if p.grad is None else p.grad
            gradient = gradients.pop(name)
            gradient = torch.zeros_like(p) if gradient is None else gradient
            assert p.grad is not None or not gradient.any(), f"{seed} {name}"
            scale = max(gradient.abs().max(), 1e-3 * largest)
            assert (found - gradient).abs().max() <= 1e-12 * scale, f"{seed} {name}"
        assert not gradients


@pytest.mark.parametrize("model_type", MOE)
def test_an_export_is_what_save_pretrained_writes(tmp_path, model_type):
    """The files are equal to the bit, except that transformers 5 transposes the experts of Qwen3-VL-MoE."""
    model = tiny.model(model_type=model_type)
    save_model(tmp_path / "ours", model, tiny.processor(), max_shard_size=60_000)
    theirs = CLASSES[model_type].from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=10**9)
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    found = {}
    for file in (tmp_path / "ours").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys() and "model.language_model.layers.0.mlp.experts.down_proj" in found
    transposed = model_type == "qwen3_vl_moe"
    for name, tensor in found.items():
        assert torch.equal(tensor.mT if transposed and ".experts." in name else tensor, expected[name]), name
    sizes = (5, 64, 48) if transposed else (5, 48, 64)
    assert found["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == sizes
    for folder in ("ours", "theirs"):  # the layouts of the Hub and of transformers 5
        torch.testing.assert_close(load_model(tmp_path / folder).state_dict(), model.state_dict(), rtol=0, atol=0)
    # a file with separate experts, as transformers 5 saves a Qwen3.5-MoE that was built from a config
    singles = dict(model.state_dict())
    shutil.copytree(tmp_path / "theirs", tmp_path / "single")
    save_file(singles, tmp_path / "single" / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(load_model(tmp_path / "single").state_dict(), singles, rtol=0, atol=0)


LAYER = "model.language_model.layers.0.mlp.experts"
SAYS = r"model\.safetensors: the tensor model\.layers\.0\.mlp\.experts\.{} has shape {}, but the 5 experts of config"


@pytest.mark.parametrize(("model_type", "change", "expected"), [
    ("qwen3_vl_moe", {f"{LAYER}.down_proj": lambda x: x[:2]}, SAYS.format("down_proj", r"\(2, 64, 24\)")),
    ("qwen3_5_moe", {f"{LAYER}.gate_up_proj": lambda x: x.mT}, SAYS.format("gate_up_proj", r"\(5, 64, 48\)")),
    ("qwen3_5_moe", {f"{LAYER}.down_proj": lambda x: x[:, :, 1:]}, SAYS.format("down_proj", r"\(5, 64, 23\)")),
    (
        "qwen3_vl_moe",
        {f"{LAYER}.down_proj": None},
        r"lack 5 of the model's \d+ tensors, for example .*experts\.0\.down_proj",
    ),
], ids=["half of them", "transposed once too often", "another size", "missing"])  # fmt: skip
def test_wrong_expert_tensors_are_refused(tmp_path, model_type, change, expected):
    save_model(tmp_path / "saved", tiny.model(model_type=model_type), tiny.processor())
    file = tmp_path / "saved" / "model.safetensors"
    weights = load_file(file)
    for name, changed in change.items():
        tensor = weights.pop(name)
        if changed is not None:
            weights[name] = changed(tensor).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=expected) as error:
        load_model(tmp_path / "saved")
    assert "\n" not in str(error.value)


def test_an_expert_without_tokens_has_no_gradient():
    """So neither clipping nor weight decay nor moments change it."""
    block = Experts(tiny.config(model_type="qwen3_5_moe"), 0)
    block(torch.randn(1, 64)).sum().backward()
    has_gradients = [[p.grad is not None for p in expert.parameters()] for expert in block.experts]
    assert sorted(has_gradients) == [[False] * 3] * 3 + [[True] * 3] * 2


def adapted(model, target, **options):
    inject_adapters(model, LoRAOptions(r=3, alpha=6.0, target=target, **options))
    init_adapters(model, 0)
    for layer in adapters(model).values():
        torch.nn.init.normal_(layer.lora_B.data, std=0.3)
    return model


def test_experts_and_routers_get_adapters_only_on_request():
    few = adapters(adapted(tiny.model(model_type="qwen3_5_moe"), ["language"]))
    assert not any(".experts." in name or name.endswith(("mlp.gate", "expert_gate")) for name in few)
    assert any("shared_expert.up_proj" in name for name in few)
    model = adapted(tiny.model(model_type="qwen3_5_moe"), ["language", "experts"])
    more = adapters(model)
    assert len(more) - len(few) == 3 * (5 * 3 + 2) and "model.layers.0.mlp.experts.4.down_proj" in more
    model.model.layers[0].mlp(torch.randn(40, 64)).square().sum().backward()
    assert all(layer.lora_B.grad.any() for name, layer in more.items() if ".layers.0.mlp." in name)


@pytest.mark.parametrize("model_type", MOE)
def test_experts_in_4_bits_are_loaded_and_saved(model_type, tmp_path):
    """Experts are quantized while fused tensors are loaded, and are saved as fused tensors."""
    processor = tiny.processor()
    save_model(tmp_path / "base", tiny.model(model_type=model_type), processor)
    options = LoRAOptions(r=3, alpha=6.0, target=["language", "experts"], quantize="nf4")
    read = load_model(tmp_path / "base", torch.float64, adapt=partial(inject_adapters, options=options))
    name = "model.layers.0.mlp.experts.4.down_proj.base"
    expected = NF4Linear(tiny.model(model_type=model_type).double().get_submodule(name.removesuffix(".base")))
    assert torch.equal(read.get_submodule(name).weight, expected.weight)
    init_adapters(read, 0)
    save_model(tmp_path / "merged", read, processor)
    saved = load_model(tmp_path / "merged").state_dict()["model.layers.0.mlp.experts.4.down_proj.weight"]
    assert torch.equal(saved, expected.weight)


@pytest.mark.slow
def test_parameters_are_counted():
    for size, held in (("Qwen3-VL-30B-A3B", 31.07e9), ("Qwen3.5-35B-A3B", 35.11e9)):
        costs = MemoryEstimator(config_json.from_dict(real_config(size)))
        assert costs.parameters == pytest.approx(held, rel=1e-3), size
