"""Test the loading, shards, saving, dtypes and refused options of sharded models."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import LoRAOptions, ShardingOptions
from minivlmrl.distributed import fsdp
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.saving import save_model
from minivlmrl.distributed.weights import copy_model, is_sharded, recompute_blocks, reshard, rollout_weights, units
from minivlmrl.files import weight_files
from minivlmrl.model import lora
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import load_model, load_processor, read_tensors
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.run.setup import build_model
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.on_ranks import ONE, launch
from tests.model.test_lora import adapted

CPU = torch.device("cpu")
ODD = {"intermediate_size": 47}  # an odd number of rows, which two ranks cannot share equally
# a tied checkpoint that is sharded over two ranks, and an untied checkpoint that is replicated on both
SECTIONS = {"tied": ["--sharding.enabled=true"], "untied": ["--sharding.enabled=true", "--sharding.replicas=2"]}
SECTIONS["drafter"] = SECTIONS["tied"]  # a Qwen3.5 checkpoint with tensors that belong to no module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create a recipe and three checkpoints: two in several files, and one with tensors that belong to no module."""
    folder = tmp_path_factory.mktemp("sharding")
    for name, tied in (("tied", True), ("untied", False)):
        (folder / f"{name}.json").write_text(json.dumps(tiny.RUN_MODEL | {"tie_word_embeddings": tied} | ODD))
        model, processor = random_model(folder / f"{name}.json", shapes.tokenizer(), 0)
        save_model(folder / name, model, processor, max_shard_size=sum(p.nbytes for p in model.parameters()) // 2)
        assert len(list((folder / name).glob("model-*"))) > 1
    (folder / "drafter.json").write_text(json.dumps(tiny.RUN_QWEN35))
    save_model(folder / "drafter", *random_model(folder / "drafter.json", shapes.tokenizer(), 0))
    file = folder / "drafter" / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.randn(9, 5).half()}, file, metadata={"format": "pt"})
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"num_threads": 1, "data": {"task": "shapes"}}))
    return folder


def load_and_save(folder: Path, overrides: list[str], world) -> dict:
    """Load, copy and save a sharded model, and return what a rank has."""
    model, processor = build_model(load_config(folder / "recipe.yaml", overrides), world)
    twin = copy_model(model)
    output = folder / f"saved {' '.join(overrides)}".replace("/", "_")
    save_model(output, model, processor, world, max_shard_size=100_000)
    with pytest.raises(OSError) as failed:
        save_model(folder / "in the way" / "checkpoint", model, processor, world)
    with rollout_weights(model, gather_weights=True) as plain:
        whole = {name: p.clone() for name, p in plain.named_parameters()}
    return {
        "kept": {name: p.to_local().clone() for name, p in model.named_parameters()},
        "bytes": {name: p.to_local().untyped_storage().nbytes() for name, p in model.named_parameters()},
        "whole": whole,
        "saved": output,
        "failed": str(failed.value),
        "copied": all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
    }


@pytest.fixture(scope="module")
def loaded(folder):
    (folder / "in the way").write_text("")  # a file where a folder should be created
    cases = {name: [f"--model.path={folder / name}", *options] for name, options in SECTIONS.items()}
    return launch(2, folder, cases, load_and_save)


@pytest.mark.parametrize("name", SECTIONS)
def test_each_rank_keeps_its_rows_and_saves_the_whole_checkpoint(loaded, folder, name):
    expected = dict(load_model(folder / name).named_parameters())
    for rank, results in enumerate(loaded):
        result = results[name]
        assert result["whole"].keys() == result["kept"].keys() == expected.keys()
        assert result["tied"] == (name == "tied") and result["copied"] and "in the way" in result["failed"]
        for parameter, weight in expected.items():
            assert torch.equal(result["whole"][parameter], weight), parameter
            rows = -(-len(weight) // 2)
            first, own = weight[:rows], weight[rank * rows : (rank + 1) * rows]
            if name == "untied":
                first = own = weight
            assert torch.equal(result["kept"][parameter], own), parameter
            # FSDP pads the shard of the last rank
            assert result["bytes"][parameter] == first.nbytes, "no part is a view of the whole"
        saved = dict(load_model(result["saved"]).named_parameters())
        assert saved.keys() == expected.keys() and all(torch.equal(saved[key], p) for key, p in expected.items())
        load_processor(result["saved"])


IMAGES = [(1, 4, 6)], [(1, 8, 4)]


def batch(config):
    generator = torch.Generator().manual_seed(0)
    prompts = [tiny.prompt(generator, row) for row in IMAGES]
    return tiny.pack(prompts, [[tiny.completion(generator, n) for n in (3, 5)] for _ in prompts], config)


def gradients(model):
    logps, entropies = per_token_logps(model, batch(model.config))
    (logps.sum() + 0.1 * entropies.sum()).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logps.detach(), {name: g.full_tensor() if is_sharded(model) else g for name, g in found.items()}


def assert_same(model, other):
    (logps, found), (expected, theirs) = gradients(model), gradients(other)
    assert torch.equal(logps, expected)
    for name, gradient in theirs.items():
        assert torch.equal(found[name], gradient.to(found[name].dtype)), name
    return found


def sharded_model(dtype=torch.float32, recompute=False, compute_dtype=None, model_type="qwen2_5_vl", **options):
    section = ShardingOptions(enabled=compute_dtype is None, **options)
    sharding = fsdp.Sharding(section, ONE, dtype, recompute, compute_dtype)
    model = tiny.model(dtype=dtype, model_type=model_type)
    sharding.shard(model)
    return model


def test_weights_stay_float32_while_layers_compute_in_bfloat16(one_rank):
    """Log-probabilities and gradients equal those of a model with bfloat16 weights."""
    model, half = sharded_model(compute_dtype=torch.bfloat16), tiny.model(dtype=torch.bfloat16)
    seen = set()
    model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.update({args[0].dtype, args[1].dtype}))
    model.visual.blocks[1].register_forward_pre_hook(lambda module, args: seen.add(("angles", args[1].dtype)))
    found = assert_same(model, half)
    assert seen == {torch.bfloat16, ("angles", torch.float32)}
    assert {x.dtype for x in (*found.values(), *model.parameters())} == {torch.float32}


def test_offloaded_shards_of_a_gpu_are_pinned(monkeypatch):
    meshes = []
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda device, *_, **__: meshes.append(device))
    section = ShardingOptions(enabled=True, cpu_offload=True)
    for device, pinned in (("cuda", True), ("cpu", False)):
        sharding = fsdp.Sharding(section, World(device=torch.device(device)), torch.float32)
        assert sharding.offload.pin_memory == pinned and sharding.device == torch.device("cpu")
    assert meshes == ["cuda", "cpu"]


@pytest.mark.parametrize(("model_type", "sharded"), [("qwen3_vl", True), ("qwen3_5", False)])
def test_recomputed_blocks_have_the_same_gradients_and_keep_less(one_rank, model_type, sharded):
    make = sharded_model if sharded else tiny.model
    plain, model = make(model_type=model_type), make(model_type=model_type, **{"recompute": True} if sharded else {})
    if not sharded:
        recompute_blocks(model)
    kept = []
    for each in (plain, model):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.nbytes) or x, lambda x: x):
            per_token_logps(each, batch(each.config))
        kept.append(sum(sizes))
        reshard(each)
    assert kept[1] < kept[0] / 2
    assert_same(model, plain)


def test_a_copy_recomputes_with_its_own_weights(one_rank):
    plain = tiny.model()
    recompute_blocks(plain)
    for model in (plain, sharded_model(recompute=True)):
        with torch.no_grad():
            per_token_logps(model, batch(model.config))  # gathers weights, which the copy must not contain
        twin = copy_model(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        torch.testing.assert_close(gradients(twin)[0], gradients(tiny.model())[0])


@pytest.mark.parametrize(("model_type", "gather_weights"), [("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_weights_are_sharded_again_after_a_rollout(one_rank, model_type, gather_weights):
    model = sharded_model(model_type=model_type)
    with rollout_weights(model, gather_weights) as run:
        per_token_logps(run, batch(model.config))
        assert gather_weights == (not is_sharded(run))  # one rank alone can run only a model without shards
        assert not isinstance(model.lm_head.weight, DTensor)
        assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor) == (not gather_weights)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    found = gradients(model)[1]  # gradients after a rollout
    with torch.no_grad():
        per_token_logps(model, batch(model.config))
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)  # layers are sharded again
    expected = gradients(tiny.model(model_type=model_type))[1]
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_dtypes_of_heads_copies_and_rollout_weights(one_rank):
    """A value head computes in the dtype of its weights, even if the layers compute in bfloat16."""
    model = sharded_model(compute_dtype=torch.bfloat16)
    head = torch.nn.Linear(4, 1)
    model.sharding.shard_head(head)
    assert head(torch.zeros(1, 4)).dtype == torch.float32
    assert head._get_fsdp_state()._states_to_backward_prefetch  # the prefetch order is set, and is not FSDP's default
    assert copy_model(model).lm_head.weight.dtype == torch.float32
    assert copy_model(model, in_compute_dtype=True).lm_head.weight.dtype == torch.bfloat16
    with rollout_weights(model, gather_weights=True) as run:
        assert run.lm_head.weight.dtype == torch.bfloat16
    assert sharded_model(dtype=torch.bfloat16).sharding.precision.reduce_dtype == torch.float32


def test_each_unit_prefetches_the_previous_one_in_the_backward(one_rank):
    """With FSDP's default order of prefetching, two ranks might gather different layers."""
    model = sharded_model()
    ahead = {unit: unit._get_fsdp_state()._states_to_backward_prefetch for unit in units(model)}
    for tower in (model.visual.blocks, model.model.layers):
        for before, block in zip([tower[0], *tower], tower, strict=False):
            assert ahead[block] == [before._get_fsdp_state()]
    assert ahead[model] == [model.model.layers[-1]._get_fsdp_state()]


def test_a_rollout_of_a_sharded_model_uses_16_bit_copies_of_adapters(one_rank, monkeypatch):
    """With a 16-bit compute_dtype, gathered adapters already have 16 bits."""
    monkeypatch.setattr(lora, "is_half_on_gpu", lambda device, dtype: dtype == torch.bfloat16)
    for dtype, compute_dtype in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        model = adapted(dtype=dtype)
        fsdp.Sharding(ShardingOptions(enabled=True), ONE, dtype, compute_dtype=compute_dtype).shard(model)
        for gather_weights, expected in ((True, torch.bfloat16), (False, torch.float32)):
            with rollout_weights(model, gather_weights) as run:
                assert {p.dtype for p in tiny.adapter_parameters(run)} == {expected}
                per_token_logps(run, batch(model.config))
        assert {p.dtype for p in tiny.adapter_parameters(model)} == {torch.float32}


def test_torch_versions_that_cannot_shard_bytes_are_refused(one_rank, monkeypatch):
    sharding, model = fsdp.Sharding(ShardingOptions(enabled=True), ONE, torch.float32), tiny.model()
    lora.inject_adapters(model, LoRAOptions(r=2, quantize="nf4"))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(ValueError, match=r"adapter\.quantize: torch 2\.11.* install torch 2\.13"):
        sharding.shard(model)


def test_ranks_must_be_a_multiple_of_the_replicas():
    with pytest.raises(ValueError, match=r"sharding\.replicas is 2, but the number of ranks, 3, is not a multiple"):
        fsdp.Sharding(ShardingOptions(enabled=True, replicas=2), World(0, 3, CPU), torch.float32)


@pytest.mark.parametrize("sharding", [[], ["--sharding.enabled=true"]])
def test_a_checkpoint_has_the_dtype_of_its_folder(one_rank, folder, tmp_path, sharding):
    """A model trained in float32 is saved in the dtype of its checkpoint, unless model.save_dtype is set."""
    save_model(tmp_path / "half", load_model(folder / "untied").bfloat16(), load_processor(folder / "untied"))
    overrides = [f"--model.path={tmp_path / 'half'}", "--model.dtype=float32", *sharding]
    for more, expected in (([], "bfloat16"), (["--model.save_dtype=float32"], "float32")):
        model, processor = build_model(load_config(folder / "recipe.yaml", [*overrides, *more]), ONE)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)  # bfloat16 cannot represent the new value
        for trained in (model, copy_model(model)):  # a critic may be a copy of the policy
            save_model(tmp_path / "out", trained, processor, ONE)
            saved = dict(chain(*map(read_tensors, weight_files(tmp_path / "out"))))
            assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == expected
            dtype = getattr(torch, expected)
            for name, parameter in model.named_parameters():
                full = parameter.full_tensor() if sharding else parameter
                assert full.dtype == torch.float32 and saved[name].dtype == dtype
                assert torch.equal(saved[name], full.to(dtype)), name
