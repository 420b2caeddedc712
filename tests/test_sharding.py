"""Sharded models: what each rank reads and keeps, what is written, which dtypes compute, and what is refused."""

import gc
import json
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from on_ranks import ONE, launch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from minivlmrl.batch import pack
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.generate import draw_by
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.logprobs import per_token_logps
from minivlmrl.rows import uniform_numbers
from minivlmrl.run.config import load_config
from minivlmrl.run.model import build_model
from minivlmrl.run.optimizer import OptimizerSection, TrainingConfig, build_optimizer
from minivlmrl.scale.checkpoint import load_model, load_processor, random_model, save_model
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import (
    Lockstep,
    Sharding,
    ShardingSection,
    copy_model,
    is_sharded,
    recompute_blocks,
    reshard,
    rollout_weights,
    units,
)
from minivlmrl.tasks import shapes

import tiny
from draws import ids_of, options, prompts, sample

CPU = torch.device("cpu")
SECTIONS = {"sharded": ["--sharding.enabled=true"], "replicas": ["--sharding.enabled=true", "--sharding.replicas=2"]}


def two_files(folder: Path):
    """The weights of a checkpoint in two files, as large models have them."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    files = {f"model-{i}-of-2.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recipe, and two checkpoints in two files each: a tied one and an untied one."""
    folder = tmp_path_factory.mktemp("sharding")
    for name, tied in (("tied", True), ("untied", False)):
        (folder / f"{name}.json").write_text(json.dumps(tiny.RUN_MODEL | {"tie_word_embeddings": tied}))
        model, processor = random_model(folder / f"{name}.json", shapes.tokenizer(), 0)
        save_model(folder / name, model, processor)
        two_files(folder / name)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"num_threads": 1, "data": {"task": "shapes"}}))
    return folder


def build(folder, overrides, world):
    return build_model(load_config(folder / "recipe.yaml", overrides), world)


def load_and_save(folder: Path, overrides: list[str], world) -> dict:
    """Load in parts, copy, save; what this rank held of each weight."""
    model, processor = build(folder, overrides, world)
    twin = copy_model(model)
    output = folder / f"saved {' '.join(overrides)}".replace("/", "_")
    save_model(output, twin, processor, world)
    with rollout_weights(model, world, gather_weights=True):
        whole = {name: p.clone() for name, p in model.named_parameters()}
    return {
        "kept": {name: p.to_local().clone() for name, p in model.named_parameters()},
        "whole": whole,
        "saved": output,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "units": len(units(model)),
    }


@pytest.fixture(scope="module")
def loaded(folder):
    cases = {
        f"{name} {way}": [f"--model.path={folder / name}", *options]
        for name in ("tied", "untied")
        for way, options in SECTIONS.items()
    }
    return {
        name: [rank[name] for rank in ranks] for ranks in [launch(2, folder, cases, load_and_save)] for name in cases
    }


@pytest.mark.parametrize("way", SECTIONS)
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_each_rank_keeps_its_rows_and_together_they_are_the_checkpoint(loaded, folder, name, way):
    expected = dict(load_model(folder / name).named_parameters())
    for rank, result in enumerate(loaded[f"{name} {way}"]):
        assert result["whole"].keys() == result["kept"].keys() == expected.keys()
        assert result["tied"] == (name == "tied")
        for parameter, weight in expected.items():
            assert torch.equal(result["whole"][parameter], weight), parameter
            rows = -(-len(weight) // 2)
            own = weight if way == "replicas" else weight[rank * rows : (rank + 1) * rows]
            assert torch.equal(result["kept"][parameter], own), parameter


@pytest.mark.parametrize("way", SECTIONS)
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_what_is_saved_in_parts_is_what_one_process_would_have_saved(loaded, folder, name, way):
    saved = load_model(loaded[f"{name} {way}"][0]["saved"])
    for (parameter, weight), expected in zip(
        saved.named_parameters(), load_model(folder / name).parameters(), strict=True
    ):
        assert torch.equal(weight, expected), parameter
    load_processor(loaded[f"{name} {way}"][0]["saved"])


def fail_to_save(folder: Path, overrides: list[str], world) -> str:
    """Saving where a file lies in the way."""
    model, processor = build(folder, overrides, world)
    try:
        save_model(folder / "in the way" / "checkpoint", model, processor, world)
    except OSError as error:
        return str(error)


def test_all_ranks_know_that_saving_failed(folder):
    (folder / "in the way").write_text("")
    said = launch(2, folder, {"case": [f"--model.path={folder / 'untied'}", *SECTIONS["sharded"]]}, fail_to_save)
    assert all("in the way" in rank["case"] for rank in said)


# memory

LARGE = {
    "model_type": "qwen2_5_vl", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
    "rope_scaling": {"mrope_section": [8, 12, 12]},
    "vision_config": tiny.RUN_MODEL["vision_config"] | {"out_hidden_size": 1024},
}  # fmt: skip


def peak_of_loading(folder: Path, overrides: list[str], world) -> tuple[int, int]:
    """Bytes of host memory that this process has had at most, before and with the model."""
    import torch._dynamo  # noqa: F401 (FSDP does, and it imports Triton: 100 MB where that is installed)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    build(folder, overrides, world)
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
def test_a_rank_never_has_much_more_than_its_part_of_the_model(folder):
    """300 million weights of float32 in two files: under 0.65 of their bytes, beside what Python and torch take."""
    processor = load_processor(folder / "untied")
    ids = {f"{kind}_token_id": processor.tokenizer.special_tokens[f"<|{kind}_pad|>"] for kind in ("image", "video")}
    (folder / "large.json").write_text(json.dumps(LARGE))
    model = Qwen2_5_VL(ModelConfig.from_dict(LARGE | ids))  # as torch draws them: quick
    size = sum(p.nbytes for p in model.parameters())
    assert 280e6 < size / 4 < 320e6
    save_model(folder / "large", model, processor)
    del model
    gc.collect()
    two_files(folder / "large")
    gc.collect()
    cases = {"case": [f"--model.path={folder / 'large'}", *SECTIONS["sharded"]]}
    peaks = [rank["case"] for rank in launch(2, folder, cases, peak_of_loading)]
    print("share of the model's bytes:", [(round((peak - before) / size, 3), before) for before, peak in peaks])
    assert max(peak - before for before, peak in peaks) < 0.65 * size


# one process


@pytest.fixture
def alone():
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def batch():
    generator = torch.Generator().manual_seed(0)
    prompts = [tiny.prompt(generator, grids) for grids in ([(1, 4, 6)], [(1, 8, 4)])]
    return pack(prompts, [[tiny.completion(generator, n) for n in (3, 5)] for _ in prompts], tiny.config())


def gradients(model):
    logps, entropies = per_token_logps(model, batch())
    (logps.sum() + 0.1 * entropies.sum()).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return logps.detach(), {name: g.full_tensor() if is_sharded(model) else g for name, g in found.items()}


def sharded_model(dtype=torch.float32, recompute=False, compute_dtype=None, **options):
    section = ShardingSection(enabled=compute_dtype is None, **options)
    sharding = Sharding(section, ONE, dtype, recompute, compute_dtype)
    model = tiny.model(dtype=dtype)
    sharding.shard(model)
    return model


def test_weights_stay_float32_while_layers_compute_in_bfloat16(alone):
    """The numbers are those of a bfloat16 model; the gradients are added up in float32."""
    model, half = sharded_model(compute_dtype=torch.bfloat16), tiny.model(dtype=torch.bfloat16)
    seen = set()
    model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.update({args[0].dtype, args[1].dtype}))
    model.visual.blocks[1].register_forward_pre_hook(lambda module, args: seen.add(("angles", args[1].dtype)))
    (logps, found), (expected, theirs) = gradients(model), gradients(half)
    assert torch.equal(logps, expected)
    assert seen == {torch.bfloat16, ("angles", torch.float32)}
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, theirs[name].float()), name
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_copy_in_the_dtype_that_computes_computes_the_same(alone):
    """A reference takes half the memory, and its numbers have the same bits."""
    model = sharded_model(compute_dtype=torch.bfloat16)
    twin = copy_model(model, to_compute=True).requires_grad_(False)
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    assert torch.equal(per_token_logps(twin, batch())[0], per_token_logps(model, batch())[0])


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}], ids=str)
def test_one_process_computes_what_it_would_unsharded(alone, options):
    model = sharded_model(**options)
    offloads = isinstance(model.sharding.options["offload_policy"], CPUOffloadPolicy)
    assert offloads == bool(options)  # without a GPU no number shows it
    (logps, found), (expected, theirs) = gradients(model), gradients(tiny.model())
    assert torch.equal(logps, expected)
    assert all(torch.equal(found[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("sharded", [False, True])
def test_recomputed_blocks_have_the_same_gradients_and_keep_less(alone, sharded):
    plain = sharded_model() if sharded else tiny.model()
    if sharded:
        model = sharded_model(recompute=True)
    else:
        model = tiny.model()
        recompute_blocks(model)
    kept = []
    for each in (plain, model):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.nbytes) or x, lambda x: x):
            per_token_logps(each, batch())
        kept.append(sum(sizes))
        reshard(each)
    assert kept[1] < kept[0] / 2
    (logps, found), (expected, theirs) = gradients(model), gradients(plain)
    assert torch.equal(logps, expected)
    assert all(torch.equal(found[name], theirs[name]) for name in theirs)


def test_a_copy_recomputes_with_its_own_weights(alone):
    for model in (tiny.model(), sharded_model(recompute=True)):
        if not is_sharded(model):
            recompute_blocks(model)
        twin = copy_model(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        logps, _ = gradients(twin)
        torch.testing.assert_close(logps, gradients(tiny.model())[0])


@pytest.mark.parametrize("gather_weights", [True, False])
def test_weights_are_sharded_again_after_a_rollout(alone, gather_weights):
    model = sharded_model()
    with rollout_weights(model, ONE, gather_weights) as joint:
        per_token_logps(model, batch())
        assert (joint is None) == gather_weights
        assert model.vision_in_step.joint != gather_weights  # with full weights a rank may run alone
        assert not isinstance(model.lm_head.weight, DTensor)
        assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor) == (not gather_weights)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    found = gradients(model)[1]  # and training goes on as if nothing had been
    assert model.vision_in_step.joint
    with torch.no_grad():
        per_token_logps(model, batch())
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)  # layers are freed after a forward again
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(tiny.model())[1].items())


def test_a_rank_that_ends_early_decodes_until_all_have_ended():
    """The others decode 11 times; the row of this one ends before that, and stays as it is."""

    class Others:
        device, told = CPU, []

        def sum(self, own):
            self.told.append(own)
            return [own + (len(self.told) < 12)]

    world, model, ran = Others(), tiny.model(), []
    draw = draw_by(uniform_numbers(["a"], 1, 12))
    [ids] = ids_of(sample(model, prompts(1), 1, options(), range(60), draw))
    model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
    wrap = partial(Lockstep(world).keeping, max_new_tokens=12, model=model)
    with torch.no_grad():
        assert ids_of(sample(model, prompts(1), 1, options(), range(60), draw, wrap)) == [ids]
    assert 1 < len(ids) < 12 and sum(world.told) == len(ids) - 1
    assert len(ran) == 1 + 11  # the prompt, and as many steps as the others


def test_the_optimizer_has_the_sharded_weights(alone):
    model = sharded_model()
    with torch.no_grad():
        per_token_logps(model, batch())
    [group] = build_optimizer(model, TrainingConfig(), OptimizerSection()).param_groups
    assert all(isinstance(p, DTensor) for p in group["params"])


def test_ranks_must_be_a_multiple_of_the_replicas():
    with pytest.raises(ValueError, match=r"sharding\.replicas is 2, but 3 ranks are no multiple of it"):
        Sharding(ShardingSection(enabled=True, replicas=2), World(0, 3, CPU), torch.float32)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["--sharding.cpu_offload=true"], "sharding.cpu_offload is True, it must be False unless sharding is enabled")],
)
def test_options_out_of_bounds_are_refused(folder, overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(folder / "recipe.yaml", overrides)
