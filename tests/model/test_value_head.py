"""Test the value model: scored tokens, saving and loading, and refused folders."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivlmrl.config.options import ShardingOptions
from minivlmrl.data.rows import Prompt
from minivlmrl.distributed import fsdp, saving, value_models, weights
from minivlmrl.extras.reward_model import last_token_scores, pack_with_last_token
from minivlmrl.model.attention import GroupAttention
from minivlmrl.model.logprobs import completion_states
from minivlmrl.model.value_head import ValueModel, load_value_model
from tests.helpers import tiny
from tests.helpers.stages import ONE


def value_model(tied=False) -> ValueModel:
    model = ValueModel(tiny.model(tied, dtype=torch.float64))
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture
def groups():
    generator = torch.Generator().manual_seed(0)
    prompts = [tiny.prompt(generator, grids) for grids in ([(1, 4, 6)], [], [(1, 4, 4), (1, 8, 4)])]
    for prompt in prompts:
        prompt.pixel_values = prompt.pixel_values.double()
    lengths = [[3, 1, 5], [4], [2, 2]]
    return prompts, [[tiny.completion(generator, n) for n in group] for group in lengths]


def score(model, groups):
    prompts, completions = groups
    completions = tiny.to_completions(completions)
    return last_token_scores(model, pack_with_last_token(prompts, completions, model.backbone.config, "cpu"))


@torch.no_grad()
def by_hand(model: ValueModel, prompt: Prompt, completion: torch.Tensor) -> torch.Tensor:
    """Return the scores (P + C,) of all tokens of a row from a plain causal forward pass."""
    ids = torch.cat([prompt.input_ids, completion])
    batch = tiny.pack([Prompt(ids, prompt.pixel_values, prompt.image_grid_thw)], [[]], model.backbone.config)
    return model.backbone(batch, GroupAttention(batch.layout), torch.arange(len(ids))) @ model.score.weight[0]


def test_values_before_each_token_and_scores_of_answers(groups):
    """A value belongs to the state before a token, and the score of an answer to its last token."""
    model, (prompts, completions) = value_model(), groups
    rows = [(p, c) for p, group in zip(prompts, completions, strict=True) for c in group]
    exact = [by_hand(model, *row) for row in rows]
    values = [scores[len(p.input_ids) - 1 : -1] for scores, (p, _) in zip(exact, rows, strict=True)]
    found = model(tiny.pack(prompts, completions, model.backbone.config))
    torch.testing.assert_close(found, torch.cat(values), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(score(model, groups), torch.stack([x[-1] for x in exact]), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("way", ["bfloat16 weights", "bfloat16 compute"])
@torch.no_grad()
def test_values_of_a_bfloat16_model_are_float32(groups, way):
    """In bfloat16, values near 20 would have steps of 0.125."""
    prompts, completions = groups
    policy = tiny.model(dtype=torch.bfloat16 if way == "bfloat16 weights" else torch.float32)
    if way == "bfloat16 compute":
        fsdp.Sharding(ShardingOptions(), ONE, torch.float32, compute_dtype=torch.bfloat16).shard(policy)
    model = ValueModel(weights.copy_model(policy))
    model.score.weight.fill_(1 + 2**-12)
    batch = tiny.pack(prompts, completions, policy.config)
    values, states = model(batch), completion_states(model.backbone, batch)
    assert states.dtype == torch.bfloat16 and values.dtype == torch.float32
    torch.testing.assert_close(values.double(), (1 + 2**-12) * states.double().sum(1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_language_head_is_trained_only_if_tied_and_the_model_is_saved(groups, tmp_path, tied):
    model = value_model(tied)
    score(model, groups).sum().backward()
    assert model.backbone.lm_head.weight.requires_grad == tied
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == (set() if tied else {"backbone.lm_head.weight"})
    value_models.save_value_model(tmp_path / "judge", model, tiny.processor(), ONE)
    assert torch.equal(score(load_value_model(tmp_path / "judge"), groups), score(model, groups))
    assert load_value_model(tmp_path / "judge", torch.float32).score.weight.dtype == torch.float32
    assert not list(tmp_path.glob("**/*.partial"))


def test_a_plain_model_is_refused(tmp_path):
    saving.save_model(tmp_path / "policy", tiny.model(), tiny.processor())
    with pytest.raises(ValueError, match=r"policy does not contain score\.safetensors, the head of a reward model"):
        load_value_model(tmp_path / "policy")


@pytest.mark.parametrize("change", [lambda w: {"score.weight": w[:, :-1].contiguous()}, lambda w: {"head": w}])
def test_wrong_and_incomplete_heads_are_refused(tmp_path, change):
    value_models.save_value_model(tmp_path / "judge", value_model(), tiny.processor(), ONE)
    file = tmp_path / "judge" / "score.safetensors"
    save_file(change(load_file(file)["score.weight"]), file)
    with pytest.raises(ValueError, match=r"safetensors contains .* must contain only score\.weight with shape \(1, 64"):
        load_value_model(tmp_path / "judge")
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"score\.safetensors: not a complete safetensors file"):
        load_value_model(tmp_path / "judge")
