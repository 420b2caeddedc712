"""Compare generated tokens with transformers, and their log-probabilities with the forward pass of training."""

import pytest
import torch

from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.rows import uniform_numbers
from minivlmrl.generation.generate import BLOCK, UNITS, inverse_cdf, sample_by_uniforms
from minivlmrl.model.logprobs import per_token_logps
from tests.helpers import tiny
from tests.helpers.draws import SETTINGS, STOP, ids_of, options, prompts, sample, seeded, their_tokens

MORE_SETTINGS = [
    dict(temperature=0.6, top_k=3, repetition_penalty=1.1),
    dict(top_k=1000), dict(temperature=3.0, min_p=0.5, top_p=0.5), dict(repetition_penalty=0.8, top_p=0.95),
]  # fmt: skip


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_transformers_token_for_token(pair, oracle, penalty):
    theirs, model = pair
    rows = prompts(50)
    ours = sample(model, rows, 1, options(temperature=0, repetition_penalty=penalty), STOP)
    for row, [completion] in zip(rows, ours, strict=True):
        expected = their_tokens(theirs, oracle.their_inputs(row), temperature=0, repetition_penalty=penalty)
        assert completion.ids.tolist() == expected[0].tolist()
        assert completion.stopped == (completion.ids[-1].item() in STOP)
    # completions end at different steps, so rows leave the batch
    assert len({len(ids) for ids in ids_of(ours)}) > 3


@pytest.mark.parametrize("number, setting", enumerate(SETTINGS + MORE_SETTINGS), ids=str)
def test_the_same_seed_samples_the_same_tokens_as_transformers(pair, oracle, number, setting):
    """With a single prompt, minivlmrl and transformers use the same random numbers until the completion ends."""
    theirs, model = pair
    row = prompts(5, seed=number)[number % 5]
    expected = their_tokens(theirs, oracle.their_inputs(row), seed=number, **setting)
    [[completion]] = sample(model, [row], 1, options(**setting), STOP, seeded(number))
    assert completion.ids.tolist() == expected[0].tolist()


def recorded_less_scored(model, sampling):
    rows = prompts(5)
    completions = sample(model, rows, 6, sampling, STOP, seeded())
    assert len({len(ids) for ids in ids_of(completions)}) > 3
    logps, _ = per_token_logps(model, tiny.pack(rows, completions, model.config), temperature=sampling.temperature)
    return (logps - torch.cat([c.logps for group in completions for c in group])).abs()


@pytest.mark.parametrize("filters", [{}, dict(top_p=0.9), dict(top_k=9, min_p=0.1)], ids=str)
def test_sampler_logps_equal_the_scorer_in_float32(filters):
    assert recorded_less_scored(tiny.model(), options(temperature=0.8, **filters)).max() < 1e-5


def test_sampler_and_scorer_agree_in_bfloat16_with_the_key_biases_of_qwen():
    """The key biases put all attention scores near 220, where neighboring bfloat16 numbers differ by 1."""
    model = tiny.model(dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                # products of 440 in two dimensions, divided by the root of the head dimension 16, give a score of 220
                proj.bias.view(-1, 16)[:, 7::8] += 440**0.5
    difference = recorded_less_scored(model, options())
    assert len(difference) > 100 and difference.max() < 0.15 and difference.mean() < 0.01


def test_a_prompt_is_processed_once_for_all_its_completions(monkeypatch):
    model = tiny.model()
    rows = prompts(2)
    seen = []
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda x, *rest: (seen.append(len(x)), forward(x, *rest))[1])
    sample(model, rows, 8, SamplingOptions(max_new_tokens=3), (), seeded())
    assert seen == [sum(len(row.input_ids) for row in rows), 16, 16]


def test_logits_that_are_not_finite_end_the_generation():
    model = tiny.model()
    sampling = SamplingOptions(max_new_tokens=4)
    with torch.no_grad():
        model.model.embed_tokens.weight[3:] = float("nan")
        model.model.embed_tokens.weight[290:294] = 0
    row = prompts(3)[2]  # without an image
    row.input_ids.clamp_(max=2)
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(model, [row], 2, sampling, (), sample_by_uniforms(uniform_numbers(["a"], 2, 4)))


def test_a_random_number_selects_a_token_by_cumulative_probability():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]]).expand(7, -1)
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(probs, numbers).tolist() == [0, 0, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("vocab", [1, BLOCK - 1, BLOCK, 1000])
def test_sums_by_blocks_choose_the_ids_of_one_sum(vocab):
    generator = torch.Generator().manual_seed(vocab)
    probs = (4 * torch.randn(200, vocab, generator=generator)).softmax(-1)
    probs[:, 200:600] = 0  # whole blocks without probability
    numbers = torch.rand(200, generator=generator, dtype=torch.float64)
    sums = (probs * UNITS).long().cumsum(-1)
    expected = torch.searchsorted(sums, (numbers * sums[:, -1]).long()[:, None], right=True)[:, 0]
    assert torch.equal(inverse_cdf(probs, numbers), expected)


def test_tokens_removed_by_filters_are_never_sampled():
    """Cumulative sums of 152k float32 probabilities are off by 1e-6, but sums of integers are exact."""
    probs = torch.rand(151_936, generator=torch.Generator().manual_seed(0))
    probs[::3] = 0
    probs[-1000:] = 0
    probs /= probs.sum()
    numbers = torch.linspace(0, 1 - 2**-53, 40, dtype=torch.float64)
    ids = inverse_cdf(probs.expand(40, -1), numbers)
    assert (probs[ids] > 0).all()
    ends = (probs.double().cumsum(0) / probs.double().sum())[ids]
    assert (ends >= numbers - 1e-10).all()
    assert (ends - probs[ids] <= numbers + 1e-10).all()
