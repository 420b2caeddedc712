"""Compare log-probabilities and gradients of a packed group with separate rows, in float64."""

import pytest
import torch

from minivlmrl.model.logprobs import completion_states, logps_of_states, per_token_logps
from tests.helpers import tiny

# prompts with an image, two images of other sizes, no image, an image with as many patches as the first, and a video
GRIDS = [[(1, 6, 10)], [(1, 18, 4), (1, 4, 6)], [], [(1, 10, 6)], [(3, 4, 6)]]


def groups(num_generations):
    generator = torch.Generator().manual_seed(0)
    prompts = [tiny.prompt(generator, grids) for grids in GRIDS]
    lengths = torch.randint(1, 9, (len(prompts), num_generations), generator=generator).tolist()
    return prompts, [[tiny.completion(generator, n) for n in group] for group in lengths]


def scored(model, values, weights):
    gradients = torch.autograd.grad((values * weights).sum(), list(model.parameters()))
    return [values.detach(), *gradients]


def assert_equal(actual, expected, tolerance=1e-12):
    difference = (actual - expected).abs().max() / expected.abs().max()
    assert difference <= tolerance, f"{difference:.1e}"


@pytest.mark.parametrize(("num_generations", "kind"), [
    (1, {}), (3, {"tied": True}), *((3, {"model_type": name}) for name in ("qwen2_vl", "qwen3_vl", "qwen3_5")),
], ids=str)  # fmt: skip
def test_one_group_equals_separate_rows(num_generations, kind):
    model = tiny.model(**kind, dtype=torch.float64)
    prompts, completions = groups(num_generations)
    batches = [tiny.pack(prompts, completions, model.config)]
    for prompt, group in zip(prompts, completions, strict=True):
        batches += [tiny.pack([prompt], [[ids]], model.config) for ids in group]
    together, *alone = (torch.stack(per_token_logps(model, batch, temperature=0.7)) for batch in batches)
    weights = torch.randn(together.shape, dtype=torch.float64)
    separate = scored(model, torch.cat(alone, dim=1), weights)
    for actual, expected in zip(scored(model, together, weights), separate, strict=True):
        assert expected.abs().max() > 0
        assert_equal(actual, expected)


@pytest.mark.parametrize("temperature", [(), (0.7,)], ids=["1 by default", "0.7"])
def test_the_fused_functions_equal_their_definition(temperature):
    model = tiny.model(dtype=torch.float64)
    batch = tiny.pack(*groups(3), model.config)
    weights = torch.tensor([[1.0], [0.3]])
    logits = model.lm_head(completion_states(model, batch)) / (temperature or (1.0,))[0]
    log_probs = logits.log_softmax(-1)  # (M, vocab_size)
    chosen = log_probs.gather(1, batch.completion_ids[:, None])[:, 0]
    plain, *fused = (
        scored(model, torch.stack(values), weights)
        for values in (
            (chosen, -(log_probs.exp() * log_probs).sum(-1)),
            per_token_logps(model, batch, *temperature),
            logps_of_states(model, completion_states(model, batch), batch, *temperature),
        )
    )
    for results in fused:
        for actual, expected in zip(results, plain, strict=True):
            assert_equal(actual, expected)
