"""The filters against transformers' logits processors, bit for bit, and where a completion is cut."""

import pytest
import torch

from minivlmrl.hub.checker import build
from minivlmrl.sampling.filters import SamplingOptions, filter_logits

from draws import SETTINGS, logits

EXTREMES = [
    dict(top_k=1), dict(top_k=1000), dict(top_p=1e-6), dict(top_p=0.999), dict(min_p=1.0), dict(temperature=1e-6),
    dict(temperature=20.0), dict(repetition_penalty=0.5), dict(temperature=0.0, top_k=1, top_p=0.01),
]  # fmt: skip


def theirs(setting, prompt, scores):
    """Scores after transformers' processors, in the order in which generate applies them."""
    p = pytest.importorskip(
        "transformers.generation.logits_process", reason="oracle missing: pip install transformers==5.23.0"
    )
    sampling = SamplingOptions(**setting)
    chain = [p.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    if sampling.temperature:  # else do_sample is off, and then nothing of this
        chain.append(p.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            chain.append(p.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            chain.append(p.TopPLogitsWarper(sampling.top_p))
        chain.append(p.MinPLogitsWarper(sampling.min_p))
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
        actual = filter_logits(scores, SamplingOptions(**setting), seen)
        assert torch.equal(actual, theirs(setting, prompt, scores))


@pytest.mark.parametrize("setting", [dict(top_k=1), dict(top_p=0.9), dict(min_p=0.1), dict(repetition_penalty=1.1)],
                         ids=str)  # fmt: skip
def test_each_option_asks_for_the_filters(setting):
    assert SamplingOptions(**setting).filtered and not SamplingOptions(0.5, 9, [3], stop_strings=["a"]).filtered


@pytest.mark.parametrize("bad, says", [
    (dict(stop_token_ids=[3, -1]), "0 or more"), (dict(stop_strings=["a", ""]), "without an empty text"),
    (dict(temperature=float("nan")), "0 or more"),
], ids=str)  # fmt: skip
def test_settings_out_of_bounds_are_refused(bad, says):
    with pytest.raises(ValueError, match=f"recipe.yaml: sampling.{next(iter(bad))}.* must be .*{says}"):
        build(SamplingOptions, bad, "recipe.yaml", "sampling.")
