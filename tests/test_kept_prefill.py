"""A prefill that is kept for training: the same draws, and the gradients of the whole run, in float64."""

from itertools import chain

import pytest
import torch
from test_logprobs import assert_equal, groups

from minivlmrl.batch import pack
from minivlmrl.generate import SamplingConfig, draw_by, generate, uniform_numbers
from minivlmrl.grpo import GRPO
from minivlmrl.logprobs import per_token_logps
from minivlmrl.run.config import load_config
from minivlmrl.sampling.kept_prefill import KeptPrefill, keep_prefill
from minivlmrl.scale.ranks import World

import tiny


def gradients(model, policy, prompts, completions):
    """Log-probabilities of a packed batch, and the gradients of a sum of these and of entropies."""
    model.zero_grad()
    logps, entropies = per_token_logps(policy, pack(prompts, completions, model.config), temperature=0.7)
    weights = torch.randn(len(logps), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ((logps * weights).sum() + 0.3 * (entropies * weights.flip(0)).sum()).backward()
    return logps.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("freeze_vision_tower", [False, True])
@pytest.mark.parametrize("num_generations", [1, 4])
@pytest.mark.parametrize("lengths", ["any", "any of one prompt", "the same"])
def test_training_continues_the_prefill_with_the_gradients_of_the_whole_run(
    num_generations, freeze_vision_tower, lengths
):
    model = tiny.model(dtype=torch.float64)
    model.visual.requires_grad_(not freeze_vision_tower)
    prompts, completions = groups(num_generations)
    if lengths != "any":  # then nothing has to be gathered, or the completions alone
        prompts, completions = [prompts[0]] * 2, completions[:2]
    if lengths == "the same":
        completions = [[torch.arange(5) + i + row for row in range(num_generations)] for i in range(2)]
    expected, whole = gradients(model, model, prompts, completions)
    model.zero_grad()
    actual, continued = gradients(model, KeptPrefill(model, prompts, "cpu"), prompts, completions)
    assert_equal(actual, expected)
    for name, gradient in whole.items():
        assert_equal(continued[name], gradient)


def test_it_draws_what_the_policy_draws_and_is_used_up_once():
    model = tiny.model()
    prompts, _ = groups(1)
    draw, sampling = draw_by(uniform_numbers(list("abcde"), 3, 5)), SamplingConfig(max_new_tokens=5)
    kept = KeptPrefill(model, prompts, "cpu")
    with torch.inference_mode():
        expected, actual = (generate(m, prompts, 3, sampling, (), draw) for m in (model, kept))
    for ours, theirs in zip(chain(*actual), chain(*expected), strict=True):
        assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.logps, theirs.logps)
    batch = pack(prompts, [[c.ids for c in group] for group in actual], model.config)
    with torch.no_grad():
        per_token_logps(kept, batch)  # a score without gradient leaves it
    assert kept.keys is not None
    first = per_token_logps(kept, batch)[0]
    assert kept.keys is None and first.requires_grad
    torch.testing.assert_close(per_token_logps(kept, batch)[0], first)  # by the whole run


def test_completions_of_one_token_need_no_run():
    model = tiny.model(dtype=torch.float64)
    prompts, _ = groups(1)
    completions = [[torch.tensor([7])] for _ in prompts]
    logps = per_token_logps(KeptPrefill(model, prompts, "cpu"), pack(prompts, completions, model.config))[0]
    assert_equal(logps, per_token_logps(model, pack(prompts, completions, model.config))[0])


@pytest.mark.parametrize(
    "change, kept",
    [
        ([], True), (["--grpo.micro_batch_size=2"], False), (["--grpo.num_iterations=2"], False),
        (["--grpo.max_tokens_per_micro_batch=900"], False), (["--sampling.max_tokens_at_once=900"], False),
        (["--model.activation_checkpointing=true"], False),
    ],
)  # fmt: skip
def test_it_is_kept_only_where_a_rollout_is_one_micro_batch_of_one_step(change, kept):
    run, (prompts, _) = load_config("recipes/shapes.yaml", change), groups(1)
    algorithm = GRPO(run, tiny.model(), None, World(0, 1, torch.device("cpu")))
    assert isinstance(keep_prefill(algorithm, prompts), KeptPrefill) == kept
