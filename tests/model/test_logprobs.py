"""Compare packed groups with separate rows in float64."""

import pytest
import torch

from minivlmrl.model import attention
from minivlmrl.model.logprobs import per_token_logps
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


@pytest.mark.parametrize(("num_generations", "kind", "padding"), [
    (1, {}, 4096), (3, {"tied": True}, 4096), (3, {}, 2),
    *((3, {"model_type": name}, n) for name, n in (("qwen2_vl", 4096), ("qwen3_vl", 4096), ("qwen3_5", 0))),
], ids=str)  # fmt: skip
def test_one_group_equals_separate_rows(num_generations, kind, padding, monkeypatch):
    monkeypatch.setattr(attention, "MAX_PADDING", padding)
    model = tiny.model(**kind, dtype=torch.float64)
    prompts, completions = groups(num_generations)
    batches = [tiny.pack(prompts, completions, model.config)]
    for prompt, group in zip(prompts, completions, strict=True):
        batches += [tiny.pack([prompt], [[ids]], model.config) for ids in group]
    together, *alone = (torch.stack(per_token_logps(model, batch, temperature=0.7)) for batch in batches)
    weights = torch.randn(together.shape, dtype=torch.float64)
    separate = scored(model, torch.cat(alone, dim=1), weights)
    for actual, expected in zip(scored(model, together, weights), separate, strict=True):
        largest = expected.abs().max()
        assert largest > 0 and (actual - expected).abs().max() <= 1e-12 * largest
