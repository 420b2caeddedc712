"""The filter chain against transformers' logits processors, and draws against the written-out distribution."""

import itertools

import pytest
import torch

from minivlmrl.generate import draw, sample, uniforms
from minivlmrl.run.config import SamplingConfig
from minivlmrl.sampling.filters import filter_logits

SETTINGS = [
    dict(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
    for t, k, p, m, r in itertools.product((1.0, 0.7), (0, 5), (1.0, 0.8), (0.0, 0.1), (1.0, 1.3))
]
EXTREMES = [
    dict(top_k=1), dict(top_k=1000), dict(top_p=1e-6), dict(top_p=0.999), dict(min_p=1.0), dict(temperature=1e-6),
    dict(temperature=20.0), dict(repetition_penalty=0.5), dict(temperature=0.0, top_k=1, top_p=0.01),
]  # fmt: skip


def logits(rows=6, vocab=40, seed=0):
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    values[:, 3] = values[:, 4] = values.topk(5).values[:, -1]  # ties at the edge of top_k
    return values


def theirs(setting, prompt, scores, banned=None):
    """Scores after transformers' processors, put in a row as generate does it."""
    p = pytest.importorskip(
        "transformers.generation.logits_process", reason="oracle missing: pip install transformers==5.23.0"
    )
    params = SamplingConfig(**setting)
    chain = [p.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    if banned is not None:
        chain.append(p.MinNewTokensLengthLogitsProcessor(prompt.shape[1], 1, banned))
    if params.temperature:  # else do_sample is off, and then nothing of this
        chain.append(p.TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chain.append(p.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            chain.append(p.TopPLogitsWarper(params.top_p))
        chain.append(p.MinPLogitsWarper(params.min_p))
    for processor in chain:
        scores = processor(prompt, scores)
    return scores


@pytest.mark.parametrize("setting", [*SETTINGS, *EXTREMES], ids=str)
@pytest.mark.parametrize("rounded", [False, True], ids=["random", "ties"])
def test_filters_equal_transformers_bit_for_bit(setting, rounded):
    for seed, vocab in enumerate((7, 40, 300)):
        generator = torch.Generator().manual_seed(seed)
        scores = logits(6, vocab, seed)
        scores = (scores * 2).round() / 2 if rounded else scores  # half of all values have equals then
        prompt = torch.randint(0, vocab, (6, 9), generator=generator)
        seen = torch.zeros(6, vocab, dtype=torch.bool).scatter(1, prompt, True)
        banned = torch.randint(0, vocab, (3,), generator=generator) if seed else None
        actual = filter_logits(scores, SamplingConfig(**setting), seen, banned)
        assert torch.equal(actual, theirs(setting, prompt, scores, banned))


def test_the_softmax_of_bfloat16_logits_is_taken_in_float32():
    rounded = logits(rows=2000, vocab=300).bfloat16()
    draws = [sample(x, SamplingConfig(), torch.Generator().manual_seed(0)) for x in (rounded, rounded.float())]
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])


def test_ties_with_the_kth_stay():
    scores = torch.tensor([[3.0, 1.0, 2.0, 1.0, 0.0]])
    assert (filter_logits(scores, SamplingConfig(top_k=3)) > float("-inf")).tolist() == [
        [True, True, True, True, False]
    ]


def test_greedy_takes_the_first_of_the_likeliest_whatever_top_p_drops():
    """transformers applies no top_p without do_sample; applied, it would drop the first of two equals."""
    scores = torch.tensor([[0.0, 2.0, 2.0, 2.0]])
    ids, _ = sample(scores, SamplingConfig(temperature=0, top_p=0.1), None)
    assert ids.tolist() == [1]


def test_banned_tokens_are_never_drawn_and_do_not_change_the_recorded_logp():
    scores, banned = logits(rows=1).expand(500, -1), torch.arange(0, 40, 2)
    params = SamplingConfig(temperature=0.7)
    ids, logps = sample(scores, params, torch.Generator().manual_seed(0), None, banned)
    assert (ids % 2 == 1).all()
    torch.testing.assert_close(logps, (scores / 0.7).log_softmax(-1).gather(1, ids[:, None])[:, 0])


def test_draws_equal_torch_multinomial_of_the_same_seed():
    params = SamplingConfig(temperature=0.7, top_p=0.9)
    ids, _ = sample(logits(), params, torch.Generator().manual_seed(0))
    probs = filter_logits(logits(), params).softmax(-1)
    assert torch.equal(ids, torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(0))[:, 0])


def test_frequencies_follow_the_filtered_distribution():
    """40,000 draws: every kept token within 5 standard errors of its probability, no dropped token ever."""
    params = SamplingConfig(temperature=0.8, top_k=6)
    one = logits(rows=1)
    n = 40_000
    ids, _ = sample(one.expand(n, -1), params, torch.Generator().manual_seed(0))
    p = filter_logits(one, params).softmax(-1)[0]
    frequency = ids.bincount(minlength=40) / n
    assert ((frequency - p).abs() <= 5 * (p * (1 - p) / n).sqrt()).all()


def test_temperature_zero_takes_the_likeliest():
    ids, logps = sample(logits(), SamplingConfig(temperature=0), None)
    assert torch.equal(ids, logits().argmax(-1))
    torch.testing.assert_close(logps, logits().log_softmax(-1).amax(-1))


def test_the_recorded_logp_is_the_policys_not_the_filters():
    params = SamplingConfig(temperature=0.5, top_k=2, top_p=0.5)
    ids, logps = sample(logits(), params, torch.Generator().manual_seed(0))
    expected = (logits() / 0.5).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logps, expected)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert (filter_logits(scores, SamplingConfig(top_p=0.7)) > float("-inf")).tolist() == [[True, True, False, False]]
    assert (filter_logits(scores, SamplingConfig(top_p=0.01)) > float("-inf")).tolist() == [[True, False, False, False]]


def test_min_p_is_a_share_of_the_likeliest_that_is_left():
    """After top_k the likeliest has probability 5/8, so 0.55 of it is 0.34: the second with 3/8 stays."""
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = filter_logits(scores, SamplingConfig(top_k=2, min_p=0.55)) > float("-inf")
    assert kept.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    "bad", [dict(temperature=-1.0), dict(top_k=-1), dict(top_p=0.0), dict(top_p=1.5), dict(min_p=2.0),
            dict(repetition_penalty=0.0), dict(max_new_tokens=0), dict(min_new_tokens=-1), dict(max_length=1),
            dict(min_new_tokens=9, max_new_tokens=8), dict(stop_token_ids=[3, -1]), dict(stop_strings=["a", ""]),
            dict(temperature=float("nan"))], ids=str)  # fmt: skip
def test_settings_out_of_bounds_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingConfig(**bad)


# draws by numbers


def test_a_number_takes_the_token_at_which_the_cumulative_probability_exceeds_it():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]]).expand(7, -1)
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs, numbers).tolist() == [0, 0, 2, 2, 2, 3, 3]


def test_no_number_draws_a_dropped_token():
    """The sums of 152k float32 probabilities are off by 1e-6: units that are whole add up without error."""
    probs = torch.rand(1, 151_936, generator=torch.Generator().manual_seed(0))
    probs[:, torch.arange(0, 151_936, 3)] = 0
    probs[:, -1000:] = 0
    probs = (probs / probs.sum()).expand(400, -1)
    numbers = torch.linspace(0, 1 - 2**-53, 400, dtype=torch.float64)
    ids = draw(probs, numbers)
    assert (probs[0, ids] > 0).all()
    exact = probs[0].double().cumsum(0) / probs[0].double().sum()
    assert ((exact[ids] >= numbers - 1e-10) & (exact[ids] - probs[0, ids] <= numbers + 1e-10)).all()


def test_draws_by_numbers_follow_the_filtered_distribution():
    params = SamplingConfig(temperature=0.8, top_k=6)
    one, n = logits(rows=1), 40_000
    numbers = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids, logps = sample(one.expand(n, -1), params, None, uniform=numbers)
    p = filter_logits(one, params).softmax(-1)[0]
    frequency = ids.bincount(minlength=40) / n
    assert ((frequency - p).abs() <= 5 * (p * (1 - p) / n).sqrt()).all()
    torch.testing.assert_close(logps, (one[0] / 0.8).log_softmax(-1)[ids])


def test_numbers_depend_on_their_key_alone():
    three, one = uniforms(["a", "b", "c"], 2, 5), uniforms(["b"], 2, 5)
    assert three.shape == (3, 2, 5) and three.dtype == torch.float64
    assert torch.equal(three[1], one[0])
    assert len(three.unique()) == 30 and three.min() >= 0 and three.max() < 1
    assert uniforms([], 2, 5).shape == (0, 2, 5)
