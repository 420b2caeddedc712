"""Sampling tests: prompts, seeded sampling, and transformers' generate with our option names."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.generation.filters import Filters
from minivlmrl.generation.generate import generate, make_token_sampler
from minivlmrl.generation.sampler import Sampler
from tests.helpers import tiny

STOP = (7, 11, 13, 17, 19, 23, 29)  # common enough that some completions end early, but not all
GRIDS = [[(1, 6, 10)], [(1, 18, 4), (1, 4, 6)], [], [(1, 4, 4)], [(1, 10, 6)]]
SETTINGS = [
    dict(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
    for t, k, p, m, r in itertools.product((1.0, 0.7), (0, 5), (1.0, 0.8), (0.0, 0.1), (1.0, 1.3))
]


def prompts(count, seed=0):
    """Return prompts with one image, two, none and so on, and different text lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [tiny.prompt(generator, GRIDS[i % len(GRIDS)], text=3 + i % 4) for i in range(count)]


def seeded(seed=0):
    """Return a function that samples tokens like transformers after torch.manual_seed(seed)."""
    generator = torch.Generator().manual_seed(seed)
    return lambda probs, rows, step: torch.multinomial(probs, 1, generator=generator)[:, 0]


def options(**values):
    return SamplingOptions(**{"max_new_tokens": 12} | values)


def sample(model, rows, num_generations, sampling, stop=STOP, draw=None, decode=None):
    """Generate completions like Sampler, with token ids from draw(probabilities, rows, step)."""
    filters = None
    if getattr(sampling, "filtered", False):
        filters = Filters(sampling, [row.input_ids for row in rows], num_generations)
    sample_token = make_token_sampler(sampling.temperature, stop, draw, filters, model.lm_head.weight.device)

    sampler = SimpleNamespace(filters=filters, on_tokens=lambda rows, ids: None, stop_strings=None)

    def sample_and_record(logits, rows, counts):
        ids, logps, ends = sample_token(logits, rows, counts)
        Sampler.record_tokens(sampler, rows, ids)
        return ids, logps, ends

    groups = generate(model, rows, num_generations, sampling.max_new_tokens, sample_and_record, decode)
    if filters:
        filters.record_masks(itertools.chain(*groups))
    return groups


def ids_of(completions):
    return [c.ids.tolist() for group in completions for c in group]


@pytest.fixture(scope="session")
def pair(oracle, tmp_path_factory):
    """Return a transformers model, and ours with the same weights."""
    return oracle.saved_pair(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokenizer_300():
    """Return a tokenizer with as many tokens as the tiny model has, so that all sampled ids can be decoded."""
    return train_tokenizer(["the cat sat on the mat, a small red cat"] * 3, vocab_size=tiny.config().vocab_size)


def their_tokens(theirs, inputs, stop=STOP, seed=0, **settings):
    """Return ids (R, C) that transformers generates, with options under our names."""
    from transformers import GenerationConfig

    theirs.generation_config = GenerationConfig(eos_token_id=list(stop) or None, pad_token_id=0)
    if settings.setdefault("temperature", 1.0) == 0:
        settings = {name: value for name, value in settings.items() if name != "temperature"} | {"do_sample": False}
    torch.manual_seed(seed)
    settings = {"max_new_tokens": 12, "do_sample": True, "top_k": 0} | settings  # default top_k in transformers is 50
    return theirs.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
