"""In batch_invariant_mode, the sampler and the trainer compute equal bits, however the tokens are batched."""

import itertools

import pytest
import torch

from minivlmrl.data.rows import uniform_numbers
from minivlmrl.generation.generate import generate, make_token_sampler, sample_by_uniforms
from minivlmrl.kernels.batch_invariant import batch_invariant_mode
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack

import draws
import tiny

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
DTYPES = (torch.float32, torch.bfloat16)


def sample(model, prompts, generations=4, new_tokens=40, temperature=1.0, options=None):
    """Sample completions, some of which end early, so that fewer rows run in later steps."""
    keys = [f"key {i}" for i in range(len(prompts))]
    uniforms = sample_by_uniforms(uniform_numbers(keys, generations, new_tokens))
    if options is not None:
        return draws.sample(model, prompts, generations, options, draw=uniforms)
    sample_token = make_token_sampler(temperature, draws.STOP[:3], uniforms)
    return generate(model, prompts, generations, new_tokens, sample_token)


@torch.no_grad()
def score(model, prompts, completions, temperature=1.0):
    """Return the log-probabilities of the trainer, for all tokens in order."""
    return per_token_logps(model, pack(prompts, completions, model.config), temperature)[0]


def ways_to_batch(model, prompts, completions, temperature=1.0):
    """Score the same tokens in several batches: {way: log-probabilities (M,)}."""
    pairs = list(zip(prompts, completions, strict=True))
    count = len(list(itertools.chain(*completions)))
    lengths = [len(c.ids) for c in itertools.chain(*completions)]
    backwards = [score(model, prompts[::-1], [g[::-1] for g in completions[::-1]], temperature)]
    parts = torch.cat(backwards).split(lengths[::-1])
    assert len(parts) == count
    return {
        "one batch": score(model, prompts, completions, temperature),
        "one prompt in a batch": torch.cat([score(model, [p], [g], temperature) for p, g in pairs]),
        "one completion in a batch": torch.cat([score(model, [p], [[c]], temperature) for p, g in pairs for c in g]),
        "in reverse order": torch.cat(parts[::-1]),
    }


def sampled_logps(completions):
    return torch.cat([c.sampled_logps for c in itertools.chain(*completions)])


def check(model_type, dtype, count=5, temperature=1.0, **sampling):
    model = tiny.model(model_type=model_type, dtype=dtype)
    prompts = draws.prompts(count)
    with batch_invariant_mode():
        completions = sample(model, prompts, temperature=temperature, **sampling)
        expected = sampled_logps(completions)
        for way, logps in ways_to_batch(model, prompts, completions, temperature).items():
            share = (logps == expected).float().mean().item()
            assert torch.equal(logps, expected), f"{model_type}, {dtype}, {way}: {share:.3f} of the bits are equal"
    return len(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_sampler_and_trainer_compute_equal_bits(model_type, dtype):
    assert check(model_type, dtype) > 300
