"""Generation against transformers' generate, against our own scorer, and against itself."""

from dataclasses import replace

import pytest
import torch
from test_oracle_model import their_inputs

from minivlmrl.config import SamplingConfig
from minivlmrl.model.batch import pack
from minivlmrl.model.checkpoint import load_model
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.rollout.generate import generate
from minivlmrl.rollout.sampler import uniforms

import tiny

STOP = (7, 11, 13, 17, 19, 23, 29)  # common enough that some rows end early and others do not
GRIDS = [[(1, 6, 10)], [(1, 18, 4), (1, 4, 6)], [], [(1, 4, 4)], [(1, 10, 6)]]


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tiny.prompt(generator, GRIDS[i % len(GRIDS)], text=3 + i % 4) for i in range(count)]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_transformers_token_for_token(tmp_path, penalty):
    transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    config = transformers.AutoConfig.for_model(**tiny.config().to_dict())
    theirs = tiny.telling_weights(transformers.Qwen2_5_VLForConditionalGeneration(config)).eval()
    theirs.save_pretrained(tmp_path)
    theirs.generation_config = transformers.GenerationConfig(eos_token_id=list(STOP), pad_token_id=0)
    rows = prompts(50)
    params = SamplingConfig(temperature=0, max_new_tokens=12, repetition_penalty=penalty)
    ours = generate(load_model(tmp_path), rows, 1, params, STOP)
    lengths = set()
    for row, [completion] in zip(rows, ours, strict=True):
        out = theirs.generate(**their_inputs(row), do_sample=False, max_new_tokens=12, repetition_penalty=penalty)
        assert completion.ids.tolist() == out[0, len(row.input_ids) :].tolist()
        assert completion.stopped == (completion.ids[-1].item() in STOP)
        lengths.add(len(completion.ids))
    assert len(lengths) > 3  # some stopped early: rows did leave the batch


def test_sampler_logps_equal_the_scorer_in_float32():
    """Token in, token out: what the sampler recorded is what training computes, to 1e-5 nats."""
    model = tiny.model()
    rows = prompts(5)
    params = SamplingConfig(temperature=0.8, max_new_tokens=12)
    completions = generate(model, rows, 6, params, STOP, torch.Generator().manual_seed(0))
    batch = pack(rows, [[c.ids for c in group] for group in completions], model.config)
    logps, _ = per_token_logps(model, batch, temperature=0.8)
    recorded = torch.cat([c.logps for group in completions for c in group])
    assert (logps - recorded).abs().max() < 1e-5
    assert len({len(c.ids) for group in completions for c in group}) > 3


def test_temperature_of_the_scorer_matters():
    model = tiny.model()
    rows = prompts(2)
    completions = generate(model, rows, 4, SamplingConfig(temperature=0.8), STOP, torch.Generator().manual_seed(0))
    batch = pack(rows, [[c.ids for c in group] for group in completions], model.config)
    recorded = torch.cat([c.logps for group in completions for c in group])
    assert (per_token_logps(model, batch, temperature=1.0)[0] - recorded).abs().max() > 0.1


def test_the_same_seed_gives_the_same_completions():
    model, rows = tiny.model(), prompts(3)
    params = SamplingConfig(max_new_tokens=8)

    def draw(seed):
        out = generate(model, rows, 4, params, STOP, torch.Generator().manual_seed(seed))
        return [c.ids.tolist() for group in out for c in group]

    assert draw(0) == draw(0) != draw(1)


def test_completions_end_with_the_first_stop_token():
    out = generate(
        tiny.model(), prompts(5), 8, SamplingConfig(max_new_tokens=10), STOP, torch.Generator().manual_seed(3)
    )
    everyone = [c for group in out for c in group]
    for completion in everyone:
        ids = completion.ids.tolist()
        assert not set(ids[:-1]) & set(STOP)
        assert completion.stopped == (ids[-1] in STOP)
        assert completion.stopped or len(ids) == 10
        assert len(completion.logps) == len(ids)
    assert {c.stopped for c in everyone} == {True, False}


def test_a_prompt_does_not_feel_its_neighbours():
    """Greedy completions of a prompt are the same alone and among prompts of other lengths."""
    model, rows = tiny.model(dtype=torch.float64), prompts(5)
    params = SamplingConfig(temperature=0, max_new_tokens=8)
    together = generate(model, rows, 1, params, STOP)
    for row, [completion] in zip(rows, together, strict=True):
        [[alone]] = generate(model, [row], 1, params, STOP)
        assert alone.ids.tolist() == completion.ids.tolist()


def test_a_prompt_is_read_once_for_all_its_completions(monkeypatch):
    """The decoder sees each prompt token once, then only new tokens."""
    model, rows, seen = tiny.model(), prompts(2), []
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda x, *rest: (seen.append(len(x)), forward(x, *rest))[1])
    generate(model, rows, 8, SamplingConfig(max_new_tokens=3), (), torch.Generator().manual_seed(0))
    assert seen == [sum(len(row.input_ids) for row in rows), 16, 16]


def test_completions_by_numbers_do_not_depend_on_what_is_generated_beside_them():
    model, rows = tiny.model(dtype=torch.float64), prompts(5)
    params, numbers = SamplingConfig(max_new_tokens=10), uniforms(list("abcde"), 3, 10)

    def draw(places):
        out = generate(model, [rows[i] for i in places], 3, params, STOP, uniforms=numbers[places])
        return [[c.ids.tolist() for c in group] for group in out]

    together = draw([0, 1, 2, 3, 4])
    assert draw([4, 2]) == [together[4], together[2]]
    assert [draw([i])[0] for i in range(5)] == together
    assert len({tuple(ids) for group in together for ids in group}) > 10


def test_logits_that_are_not_finite_end_the_generation():
    """Also where only a later token finds them so."""
    model, params = tiny.model(), SamplingConfig(max_new_tokens=4)
    with torch.no_grad():
        model.model.embed_tokens.weight[3:] = float("nan")
        model.model.embed_tokens.weight[290:294] = 0
    row = prompts(1)[0]
    row.input_ids.clamp_(max=2)
    row = replace(row, pixel_values=row.pixel_values[:0], grid_thw=row.grid_thw[:0], second_per_grid_ts=None)
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(model, [row], 2, params, (), uniforms=uniforms(["a"], 2, 4))
