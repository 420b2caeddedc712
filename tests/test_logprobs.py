"""The group forward against separate rows, in float64: same log-probabilities, same gradients, less work."""

import pytest
import torch

from minivlmrl.batch import pack
from minivlmrl.logprobs import completion_states, logps_of_states, per_token_logps, plain_per_token_logps

import tiny

# ragged prompts: one image, two of other sizes, text only, one of the first's length to share its bucket, a video
GRIDS = [[(1, 6, 10)], [(1, 18, 4), (1, 4, 6)], [], [(1, 10, 6)], [(3, 4, 6)]]


def groups(num_generations, seed=0):
    """Prompts, and for each of them completions of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [tiny.prompt(generator, grids) for grids in GRIDS]
    lengths = torch.randint(1, 9, (len(prompts), num_generations), generator=generator).tolist()
    return prompts, [[tiny.completion(generator, n) for n in group] for group in lengths]


def logps_and_gradients(model, prompts, completions, weights):
    """Score a packed batch; gradients of the weighted sum of log-probabilities and of entropies."""
    model.zero_grad()
    logps, entropies = per_token_logps(model, pack(prompts, completions, model.config), temperature=0.7)
    ((logps * weights).sum() + 0.3 * (entropies * weights.flip(0)).sum()).backward()
    return logps.detach(), entropies.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(actual, expected, tolerance=1e-12):
    difference = (actual - expected).abs().max() / expected.abs().max()
    assert difference <= tolerance, f"{difference:.1e}"


@pytest.mark.parametrize(("num_generations", "kind"), [
    (1, {}), (6, {}), (3, {"tied": True}), *((3, {"model_type": name}) for name in ("qwen2_vl", "qwen3_vl", "qwen3_5")),
], ids=str)  # fmt: skip
def test_one_group_equals_separate_rows(num_generations, kind):
    model = tiny.model(**kind, dtype=torch.float64)
    prompts, completions = groups(num_generations)
    weights = torch.randn(sum(len(c) for group in completions for c in group), dtype=torch.float64)
    logps, entropies, gradients = logps_and_gradients(model, prompts, completions, weights)

    # every completion alone with its own copy of the prompt and its images
    assert all("visual" not in name or g.abs().max() > 0 for name, g in gradients.items())  # reaches the vision tower
    model.zero_grad()
    alone = []
    start = 0
    for prompt, completion in (
        (prompt, ids) for prompt, group in zip(prompts, completions, strict=True) for ids in group
    ):
        end = start + len(completion)
        one, entropy = per_token_logps(model, pack([prompt], [[completion]], model.config), temperature=0.7)
        ((one * weights[start:end]).sum() + 0.3 * (entropy * weights.flip(0)[start:end]).sum()).backward()
        alone.append(torch.stack([one, entropy]).detach())
        start = end
    assert_equal(torch.stack([logps, entropies]), torch.cat(alone, dim=1))
    for name, p in model.named_parameters():
        assert_equal(gradients[name], p.grad)


@pytest.mark.parametrize("temperature", [(), (0.7,)], ids=["1 by default", "0.7"])
def test_the_fused_calls_equal_their_definition(temperature):
    model = tiny.model(dtype=torch.float64)
    batch = pack(*groups(3), model.config)
    results = []
    for score in (
        lambda: plain_per_token_logps(model, batch, *temperature),
        lambda: per_token_logps(model, batch, *temperature),
        lambda: logps_of_states(model, completion_states(model, batch), batch, *temperature),
    ):
        model.zero_grad()
        logps, entropies = score()
        (logps.sum() + 0.3 * entropies.sum()).backward()
        results.append([logps.detach(), entropies.detach(), *(p.grad.clone() for p in model.parameters())])
    for plain, *fused in zip(*results, strict=True):
        for each in fused:
            assert_equal(each, plain)
