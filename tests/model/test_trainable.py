"""Test the blocks of a model, and which parameters are trained with frozen parts and adapters, in all stages."""

import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import LoRAOptions, ModelOptions
from minivlmrl.model import logprobs, lora, peft, trainable
from minivlmrl.model.checkpoint import load_model
from minivlmrl.model.plain_weights import is_adapter, part_of
from minivlmrl.run.setup import build_model
from tests.helpers import tiny
from tests.helpers.runs import metrics
from tests.helpers.stages import ONE, STAGES, snapshot
from tests.model.test_lora import adapted

ALL = "[language, vision, merger]"
ADAPTERS = ["--adapter.r=4", f"--adapter.target={ALL}"]
WHOLE = "--adapter.modules_to_save=[vision, merger]"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("freeze", [["vision", "merger"], ["language", "embeddings"], ["embeddings"]], ids=str)
def test_frozen_parts(tied, freeze):
    model = tiny.model(tied)
    trainable.select_trained(model, freeze)
    trained = {part_of(name) for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"vision", "merger", "language", "embeddings"} - set(freeze)
    assert {part_of(name) for name, p in model.named_parameters() if not p.requires_grad} == set(freeze)


def test_ranges_of_layers_are_frozen():
    model = tiny.model()
    trainable.select_trained(model, ["layers.0", "visual.blocks.1-1", "embeddings"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    prefixes = ("model.layers.0.", "visual.blocks.1.", "model.embed_tokens.", "lm_head.")
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(prefixes)}
    with pytest.raises(ValueError, match=r"model.freeze is 'layers.1-9', but it must be a range within 0-2"):
        trainable.select_trained(model, ["layers.1-9"])
    with pytest.raises(ValueError, match=r"model.freeze is 'layers.3', but it must be a range within 0-2"):
        trainable.select_trained(model, ["layers.3"])
    with pytest.raises(ValueError, match=r"freeze contains 'layer.0-1', but each item must be vision, merger"):
        ModelOptions(freeze=["layer.0-1"])


def test_adapters_of_frozen_parts_are_frozen_too():
    model = adapted()
    trainable.select_trained(model, ["vision"])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(map(is_adapter, trained)) and {part_of(name) for name in trained} == {"merger", "language"}
    with pytest.raises(ValueError, match=r"model.freeze is \[merger\], so no parameter would .*adapter.target"):
        trainable.select_trained(adapted(["merger"]), ["merger"])


REFERENCED = {"grpo": "--grpo.beta=0.1", "dpo": "--dpo.beta=0.1", "ppo": "--ppo.kl_coef=0.1"}


RUNS = [*((name, "model") for name in STAGES), ("reward_model", "qwen3_vl"), ("ppo --ppo.critic=separate", "model")]


@pytest.mark.parametrize(("name", "model"), RUNS)
def test_a_stage_trains_only_adapters_and_heads(stage, name, model):
    """Reward models and critics share the base model without a copy, and no stage changes a bit of the base."""
    name, *options = name.split()
    run = stage(name, *ADAPTERS, *options, model=model)
    before = snapshot(run.trainer.trained)
    run.go(2)
    moved = {key for key, p in run.trainer.trained.named_parameters() if not torch.equal(p, before[key])}
    assert {key for key in moved if not is_adapter(key)} <= {"score.weight", "critic.weight", "critic.score.weight"}
    assert {key for key in before if key.endswith("lora_B")} <= moved
    base = {p.data_ptr() for key, p in run.model.named_parameters() if not is_adapter(key)}
    others = [p for key, p in run.trainer.trained.named_parameters() if not is_adapter(key) and "score" not in key]
    assert {p.data_ptr() for p in others if p.dim() > 1 and len(p) > 1} <= base


@pytest.mark.parametrize("name", STAGES)
def test_a_tower_and_adapters_of_the_decoder_are_trained_together(stage, name):
    run = stage(name, "--adapter.r=4", WHOLE)
    before = snapshot(run.trainer.trained)
    run.go(2)
    moved = {key for key, p in run.trainer.trained.named_parameters() if not torch.equal(p, before[key])}
    moved = {key.removeprefix("backbone.").removeprefix("policy.") for key in moved}
    kinds = {"visual" if key.startswith("visual.") else key.rpartition(".")[2] for key in moved}
    assert kinds - {"weight", "lora_A"} == {"visual", "lora_B"}
    heads = {"score.weight", "critic.weight"}
    assert {key for key in moved if key.endswith(".weight") and not key.startswith("visual.")} <= heads
    assert {key for key, _ in run.model.named_parameters() if key.startswith("visual.")} <= moved


def test_a_part_is_not_trained_in_full_and_by_adapters(stage):
    with pytest.raises(
        ValueError, match=r"adapter.target selects visual\.\S+, but modules_to_save trains the part vis"
    ):
        stage("sft", *ADAPTERS, WHOLE)


@pytest.mark.parametrize("options", [ADAPTERS, ["--adapter.r=4", WHOLE]], ids=["adapters", "tower"])
@pytest.mark.parametrize(("name", "size"), [("grpo", 2), ("grpo", 4), ("dpo", 4), ("ppo", 4)])
def test_the_reference_is_the_base_without_a_copy(stage, name, size, options):
    """If a rollout is one micro-batch, its prefill graph exists before the reference model scores completions."""
    run = stage(name, *options, REFERENCED[name], f"--{name}.micro_batch_size={size}")
    [first, *_], plain = run.next(), stage(name).model
    with torch.no_grad():
        logps = first.group.pad(
            logprobs.per_token_logps(run.model, first.group, run.trainer.config.sampling.temperature)[0]
        )
    assert torch.equal(first.ref_per_token_logps, logps)  # new adapters are 0
    kept = sum(p.numel() for p in run.trainer.reference.model.parameters())
    assert kept < 0.5 * sum(p.numel() for p in plain.parameters())
    run.update()
    run.go(1)
    second = run.next()[0]
    with torch.no_grad():
        expected = logprobs.per_token_logps(plain, second.group, run.trainer.config.sampling.temperature)[0]
    torch.testing.assert_close(second.ref_per_token_logps, second.group.pad(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("whole", [[], [WHOLE]], ids=["adapters", "tower"])
def test_a_run_continues_from_an_adapter(run, quick, user_data, checkpoint, home, whole):
    given = [*user_data, "--adapter.r=4", "--adapter.alpha=7", *whole]
    folder = run("--stages=[sft]", *given, name="first") / "checkpoint"
    start = load_model(checkpoint)
    peft.load_adapter(start, folder / "adapter")
    more = [f"--adapter.path={folder / 'adapter'}", "--stages=[dpo]"]
    model, _ = build_model(load_config(home / "recipe.yaml", [*given, *more]), ONE)
    assert any(layer.lora_B.any() for layer in lora.adapters(model).values())
    for name, parameter in start.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name
    ways = ([], ["--sharding.enabled=true"])
    lines = [metrics(run(*given, *more, *way, name=f"second{len(way)}")) for way in ways]
    assert lines[0][0]["rewards/margins"] == 0 < abs(lines[0][-1]["rewards/margins"])
    for one, other in zip(*lines, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("option", "expected"), [
    ("r=2", r"layer model\.\S+, .* has r 4 and scaling 8, but the recipe has r 2 and scaling 16. Change"),
    ("alpha=5", "has r 4 and scaling 8, but the recipe has r 4 and scaling 1.25."),
    ("modules_to_save=[merger]", r"\S+ has all weights of the parts \[\], but adapter.modules_to_save"),
    ("target=merger", r"layer model\.\S+, .* but the recipe has no adapter|layer visual.merger.* has no adapter"),
])  # fmt: skip
def test_an_adapter_with_other_settings_is_refused(tmp_path, home, checkpoint, option, expected):
    model = load_model(checkpoint)
    lora.inject_adapters(model, LoRAOptions(r=4))
    lora.init_adapters(model, 0)
    peft.gather_adapter(model)(tmp_path / "adapter")
    options = ["--model.config=null", f"--model.path={checkpoint}", f"--adapter.path={tmp_path / 'adapter'}"]
    build_model(load_config(home / "recipe.yaml", [*options, "--adapter.r=4"]), ONE)
    with pytest.raises(ValueError, match=f"adapter.path: .*{expected}"):
        build_model(load_config(home / "recipe.yaml", [*options, "--adapter.r=4", f"--adapter.{option}"]), ONE)
