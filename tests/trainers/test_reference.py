"""Test the reference model: a copy of the policy, a model from a folder, or none."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch

from minivlmrl.distributed.saving import save_model
from minivlmrl.model.build import random_model
from minivlmrl.tasks import shapes
from tests.helpers import tiny

WEIGHTS = {"dpo": "beta", "grpo": "beta", "ppo": "kl_coef"}  # the option that weights the KL


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_reference_shares_exactly_the_frozen_parameters(stage, name):
    """The training gives the same weights as with a reference that is a full copy."""
    frozen = "--model.freeze=[vision, embeddings, layers.0-0]"
    run = stage(name, frozen, f"--{name}.{WEIGHTS[name]}=0.1")
    theirs = dict(run.trainer.reference.model.named_parameters())
    shared = {key for key, value in run.model.named_parameters() if theirs[key].data_ptr() == value.data_ptr()}
    assert shared == {key for key, value in run.model.named_parameters() if not value.requires_grad}
    assert not any(value.requires_grad for value in theirs.values())
    run.go(3)
    copied = stage(name, frozen, f"--{name}.{WEIGHTS[name]}=0.1")
    copied.trainer.reference.model = copy.deepcopy(copied.model).requires_grad_(False)
    copied.go(3)
    for key, value in copied.model.named_parameters():
        assert torch.equal(value, dict(run.model.named_parameters())[key]), key


@pytest.mark.parametrize("name, options", [("grpo", []), ("ppo", ["--ppo.kl_coef=0"]), ("sft", [])])
def test_without_kl_there_is_no_reference(stage, name, options):
    run = stage(name, *options)
    run.go(2)
    assert run.trainer.reference is None and "reference" not in run.trainer.modules()


@pytest.fixture
def other(tmp_path):
    """Return a function that saves a model with a changed config, and returns its folder and the option for it."""

    def other(**changes):
        (tmp_path / "model.json").write_text(json.dumps(tiny.RUN_MODEL))
        model, processor = random_model(tmp_path / "model.json", shapes.tokenizer(), 1)
        save_model(tmp_path / "other", tiny.model_of(replace(model.config, **changes)), processor)
        return tmp_path / "other", f"--reference.path={tmp_path / 'other'}"

    return other


def their_logps(model, group, temperature):
    """Return log-probabilities of completions (R, T) by transformers, computed one completion at a time."""
    rows = []
    completions = group.completion_ids.split(group.layout.row_lengths)
    for i, completion in enumerate(completions):
        prompt = group.prompts[i * len(group.prompts) // len(completions)]
        tokens = torch.cat([prompt.input_ids, completion])[None]
        images = {"pixel_values": prompt.pixel_values.double(), "image_grid_thw": prompt.image_grid_thw}
        is_image = (tokens == model.config.image_token_id).long()
        logits = model(input_ids=tokens, mm_token_type_ids=is_image, **images).logits[0, -len(completion) - 1 : -1]
        rows.append((logits / temperature).log_softmax(-1).gather(1, completion[:, None])[:, 0])
    return group.pad(torch.cat(rows))


@pytest.mark.parametrize("name, options", [
    ("dpo", ["--adapter.r=2"]), ("ppo", []), ("grpo", ["--model.freeze=[vision, merger]"]),
])  # fmt: skip
def test_a_reference_from_a_folder_matches_transformers(stage, other, name, options, tmp_path, monkeypatch):
    """The reference model does not use embeddings of the policy's frozen vision tower."""
    from tests.helpers import oracle

    oracle.in_float64(monkeypatch, "qwen2_5_vl")
    folder, _ = other(num_hidden_layers=3)
    theirs = oracle.CLASSES["qwen2_5_vl"].from_pretrained(folder, attn_implementation="eager").double()
    theirs.save_pretrained(tmp_path / "theirs")
    shutil.copy(folder / "tokenizer.json", tmp_path / "theirs")
    options = [*options, "--sampling.temperature=0.7", f"--{name}.{WEIGHTS[name]}=0.1"]
    run = stage(name, f"--reference.path={tmp_path / 'theirs'}", *options)
    run.go()
    temperature = 1.0 if name == "dpo" else 0.7
    for batch in run.next():
        with torch.no_grad():
            expected = their_logps(theirs, batch.group, temperature)
        torch.testing.assert_close(batch.ref_per_token_logps, expected, rtol=1e-10, atol=1e-10)


def test_a_folder_that_does_not_fit_is_refused(stage, other, home):
    folder, option = other(vocab_size=400)
    with pytest.raises(ValueError, match=r"other/config\.json: vocab_size is 400, but it must be 360, as in the"):
        stage("dpo", option)
    shutil.rmtree(folder)
    _, option = other()
    content = json.loads((folder / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"2 tokens of the policy have different ids .*, for example '[ab]'; use a"):
        stage("dpo", option)


@pytest.mark.parametrize("form", ["adapters", "path"])
def test_a_resumed_run_has_the_same_reference(run, checkpoint, form, quick, varied_rollouts):
    options = [f"--reference.path={checkpoint}" if form == "path" else "--adapter.r=2"]
    options += ["--stages=[dpo]", "--dpo.max_steps=5", "--state_steps=3"]
    straight = run(*options, name="straight")
    resumed = run(*options, f"--resume={straight / 'states' / '000003'}", name="resumed")
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (straight, resumed)]
    assert lines[0][3:] == lines[1]  # another folder has its own logs
    name = "checkpoint/model.safetensors"
    assert (resumed / name).read_bytes() == (straight / name).read_bytes()
